"""The services that a bucket may be of, a row for each; each needs one in `credentials`, too.

What sets one of them apart is written where it matters: search for `is_s3`, `GCS` and `AZURE`.
"""

from __future__ import annotations

from typing import NamedTuple


class Provider(NamedTuple):
    """An object store that addresses name."""

    name: str
    schemes: tuple[str, ...]  # those that obstore knows; `Bucket` passes the address on
    # The variables that name a server, the first one that is set counts. obstore reads them itself;
    # shoal only checks what they say.
    endpoints: tuple[str, ...]
    store: str  # its class in obstore.store

    @property
    def is_s3(self) -> bool:
        """Whether it speaks the protocol of S3."""
        return self.store == "S3Store"


S3 = Provider(
    "S3",
    schemes=("s3", "s3a"),
    endpoints=("AWS_ENDPOINT_URL_S3", "AWS_ENDPOINT_URL", "AWS_ENDPOINT"),
    store="S3Store",
)
GCS = Provider("GCS", schemes=("gs",), endpoints=("GOOGLE_BASE_URL",), store="GCSStore")
AZURE = Provider(
    "Azure",
    schemes=("az", "azure", "abfs", "abfss", "adl"),
    endpoints=("AZURE_STORAGE_ENDPOINT", "AZURE_ENDPOINT"),
    store="AzureStore",
)
BY_SCHEME = {scheme: provider for provider in (S3, GCS, AZURE) for scheme in provider.schemes}


def provider_of(url: str) -> Provider:
    """Return the service of the address of a bucket."""
    return BY_SCHEME[url.partition("://")[0].lower()]

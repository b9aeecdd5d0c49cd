"""docs/clusters/kubernetes.md with recorded variables, and with names and hosts as pods have them.

Each process has a host name and an /etc/hosts of its own, as the kubelet writes it, in namespaces;
that of pod 0 in the headless service, which a cluster's DNS would answer, stands there too.
"""

from __future__ import annotations

import os
import re
import shutil
import signal

import pytest

from processes.clusters.pages import PAGES, STEPS_WITH_NOTICE, check_went_on, page_file

MANIFEST = page_file("kubernetes.md", "train.yaml")
ADDRESS = "127.77.0.10"  # and the pod's index
POD = 'hostname "$1" && mount --bind "$2" /etc/hosts && shift 2 && exec "$@"'

pytestmark = pytest.mark.skipif(
    os.geteuid() != 0 or shutil.which("unshare") is None,
    reason="host names of processes need root, and unshare",
)


def field(name):
    (value,) = re.findall(rf"^ *(?:- )?{name}: *(.+?)(?: +#.*)?$", MANIFEST, re.M)
    return value


@pytest.fixture
def start_pods(folder):
    """Return a function that starts the container's command in all pods of the manifest."""
    command = field("command").strip("[]").split(", ")
    variables = dict(re.findall(r'\{name: (\w+), value: "?([^"}]*)"?\}', MANIFEST))
    job, name = (
        re.search(p, MANIFEST)[1] for p in (r"name: (\w+)\nspec", r"- name: (\w+)\n +repl")
    )
    first, domain = f"{job}-{name}-0-0", f"{job}.default.svc.cluster.local"

    # As the page's command creates it, and the manifest takes it.
    (of,) = re.findall(r"envFrom:\n +- secretRef: \{name: (\w+)\}", MANIFEST)
    create = rf"^kubectl create secret generic {of} --from-literal=(\w+)="
    (key,) = re.findall(create, (PAGES / "kubernetes.md").read_text("utf-8"), re.M)
    secret = {key: "of the Secret"}

    def pod(index, env):
        own = f"{job}-{name}-0-{index}"
        hosts = folder.path / f"hosts{index}"
        hosts.write_text(
            f"127.0.0.1 localhost\n{ADDRESS}{index} {own}.{domain} {own}\n"
            f"{ADDRESS}0 {first}.{domain} {first}.{job}\n"
        )
        recorded = {
            "KUBERNETES_SERVICE_HOST": "10.96.0.1", "JOB_COMPLETION_INDEX": str(index),
            "HOSTNAME": own, "HOME": str(folder.path / own), "XDG_CONFIG_HOME": "",
        }  # fmt: skip
        inside = ["unshare", "--mount", "--uts", "sh", "-c", POD, "sh", own, str(hosts)]
        (folder.path / own).mkdir(exist_ok=True)  # a pod shares no home with others
        own_variables = {**variables, "RUN": folder.env["RUN"], **recorded, **secret, **env}
        return folder.start(*inside, *command, **own_variables)

    return lambda **env: [pod(index, env) for index in range(int(field("completions")))]


def test_the_manifest_says_one_number():
    numbers = {field("completions"), field("parallelism")}
    numbers |= set(re.findall(r'SHOAL_NUM_PROCESSES, value: "(\d+)"', MANIFEST))
    assert numbers == {"4"}


@pytest.mark.pages
def test_kubernetes_page_runs_and_drained_pods_exit_75_and_resume(start_pods):
    pods = start_pods(STEPS=str(STEPS_WITH_NOTICE))
    pods[0].until("from step 0")
    os.kill(pods[2].popen.pid, signal.SIGTERM)  # as the kubelet: to the first process of one pod
    assert [pod.code() for pod in pods] == [75] * 4, pods[2].said
    assert re.search(
        r"- action: Ignore .*\n +onExitCodes: \{operator: In, values: \[75\]\}", MANIFEST
    )
    again = start_pods(STEPS=str(STEPS_WITH_NOTICE))
    assert [pod.code() for pod in again] == [0] * 4, again[0].said
    check_went_on(pods[0].said + again[0].said, 4)

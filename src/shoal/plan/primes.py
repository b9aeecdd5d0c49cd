"""Prime factors."""

from __future__ import annotations


def prime_factors(number: int) -> list[int]:
    """Return the prime factors of a positive number, ascending.

    >>> prime_factors(12), prime_factors(1)
    ([2, 2, 3], [])
    """
    found, prime = [], 2
    while prime * prime <= number:
        if number % prime:
            prime += 1
        else:
            found.append(prime)
            number //= prime
    return [*found, number] if number > 1 else found

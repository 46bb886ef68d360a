"""Integer expressions of named sizes, in a normal form: equal expressions of sums and products are
equal objects.

An expression is a polynomial with integer coefficients over atoms; an atom is the name of a size,
or a floor division of two expressions. `a % b` is `a - b * (a // b)`.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from itertools import product

#: The product of the atoms of a term, sorted; empty for the constant term.
Monomial = tuple["Atom", ...]
#: Inclusive bounds; infinite ones stand for unknown.
Bounds = tuple[float, float]
#: Quotients that are replaced for tighter bounds.
MOST_REPLACED = 4


@dataclass(frozen=True, slots=True)
class Quotient:
    """A floor division that has no simpler form."""

    dividend: Expression
    divisor: Expression

    def __str__(self) -> str:
        dividend = str(self.dividend)
        if len(self.dividend.terms) > 1:
            dividend = f"({dividend})"
        return f"({dividend} // {self.divisor.text(True)})"


Atom = str | Quotient


@dataclass(frozen=True)
class Expression:
    """A polynomial: monomials and their coefficients, sorted, none of them zero.

    >>> n = Expression.of_name("n")
    >>> str((n + n * n - n) * 2), str((n * 6 + 3) // 3), str((n - 1) // 2), str(n - n)
    ('2*n*n', '2*n + 1', '((n - 1) // 2)', '0')
    """

    terms: tuple[tuple[Monomial, int], ...]

    @staticmethod
    def of_name(name: str) -> Expression:
        """Return the expression that is one size."""
        return Expression((((name,), 1),))

    @staticmethod
    def of_int(number: int) -> Expression:
        """Return a constant expression."""
        return Expression((((), number),) if number else ())

    @property
    def constant(self) -> int | None:
        """The number that it always is, or None."""
        if not self.terms:
            return 0
        (monomial, coefficient), *others = self.terms
        return None if monomial or others else coefficient

    @cached_property
    def names(self) -> frozenset[str]:
        """The names of the sizes that it depends on."""
        found: set[str] = set()
        for monomial, _ in self.terms:
            for atom in monomial:
                parts = () if isinstance(atom, str) else (atom.dividend, atom.divisor)
                found.update(*(part.names for part in parts), [] if parts else [str(atom)])
        return frozenset(found)

    def __add__(self, other: Expression | int) -> Expression:
        return polynomial([*self.terms, *_of(other).terms])

    def __sub__(self, other: Expression | int) -> Expression:
        return self + _of(other) * -1

    def __mul__(self, other: Expression | int) -> Expression:
        return polynomial(
            [
                (tuple(sorted((*one, *two), key=str)), a * b)
                for (one, a), (two, b) in product(self.terms, _of(other).terms)
            ]
        )

    def __floordiv__(self, other: Expression | int) -> Expression:
        return self.quotient(_of(other), False)

    def quotient(self, divisor: Expression, is_nonzero: bool) -> Expression:
        """Return the floor division: exact for terms that allow it, a `Quotient` of the others.

        Args:
            divisor: What to divide by.
            is_nonzero: Whether the divisor is known not to be zero.

        Raises:
            ZeroDivisionError: The divisor is the constant 0.
        """
        if divisor.constant == 0:
            raise ZeroDivisionError("integer division of a symbolic size by zero")
        if len(divisor.terms) > 1 or not (divisor.constant or is_nonzero):
            times = self.terms[0][1] // divisor.terms[0][1] if self.terms else 0
            if is_nonzero and self == divisor * times:
                return Expression.of_int(times)
            return _atom(Quotient(self, divisor))
        ((atoms, factor),) = divisor.terms
        whole: list[tuple[Monomial, int]] = []
        rest: list[tuple[Monomial, int]] = []
        for monomial, coefficient in self.terms:
            left = _without(monomial, atoms)
            if left is None or coefficient % factor:
                rest.append((monomial, coefficient))
            else:
                whole.append((left, coefficient // factor))
        if not rest:
            return polynomial(whole)
        remainder = Expression(tuple(rest))
        number, by = remainder.constant, divisor.constant
        if number is not None and by is not None:
            return polynomial(whole) + number // by
        # (a // k + c) // by is (a + c * k) // (k * by).
        found = remainder._quotient_by_number()
        if by is not None and by > 0 and found is not None and found[0] == 1:
            _, quotient, k = found
            others = (remainder - _atom(quotient)) * k
            inner = (quotient.dividend + others).quotient(Expression.of_int(k * by), True)
            return polynomial(whole) + inner
        return polynomial(whole) + _atom(Quotient(remainder, divisor))

    def at(self, sizes: Mapping[str, int]) -> int:
        """Return the value at some sizes; raise `ZeroDivisionError` as Python does."""
        total = 0
        for monomial, coefficient in self.terms:
            for atom in monomial:
                if isinstance(atom, str):
                    coefficient *= sizes[atom]
                else:
                    coefficient *= atom.dividend.at(sizes) // atom.divisor.at(sizes)
            total += coefficient
        return total

    def partly_at(self, sizes: Mapping[str, int]) -> Expression:
        """Return the expression where some sizes are numbers; no divisor may be 0 there.

        >>> n, m = Expression.of_name("n"), Expression.of_name("m")
        >>> str((n * m // 2 + m).partly_at({"m": 4}))
        '2*n + 4'
        """
        total = Expression.of_int(0)
        for monomial, coefficient in self.terms:
            product = Expression.of_int(coefficient)
            for atom in monomial:
                if isinstance(atom, str):
                    product *= sizes[atom] if atom in sizes else Expression.of_name(atom)
                else:
                    divisor = atom.divisor.partly_at(sizes)
                    product *= atom.dividend.partly_at(sizes).quotient(divisor, True)
            total += product
        return total

    def bounds(self, sizes: Mapping[str, Bounds]) -> Bounds:
        """Return bounds of the value, given bounds of the sizes; they may be wider than needed."""
        least, most = self._sum_of_bounds(sizes)
        if _is_infinite(least) or _is_infinite(most):
            return least, most
        # k * (a // k) is a, less a remainder of 0 to k - 1: scale * self is whole, and low to high.
        whole, scale, low, high = self, 1, 0, 0
        for _ in range(MOST_REPLACED):
            found = whole._quotient_by_number()
            if found is None:
                break
            coefficient, quotient, k = found
            rest = whole - _atom(quotient) * coefficient
            whole, scale = rest * k + quotient.dividend * coefficient, scale * k
            remainders = (0, -coefficient * (k - 1))
            low, high = low * k + min(remainders), high * k + max(remainders)
            ends = whole._sum_of_bounds(sizes)
            least = max(least, -(-(ends[0] + low) // scale))
            most = min(most, (ends[1] + high) // scale)
        return least, most

    def _quotient_by_number(self) -> tuple[int, Quotient, int] | None:
        """Return the first term that is a quotient by a positive number, as its parts."""
        for monomial, coefficient in self.terms:
            if len(monomial) == 1 and isinstance(monomial[0], Quotient):
                k = monomial[0].divisor.constant
                if k is not None and k > 0:
                    return coefficient, monomial[0], k
        return None

    def _sum_of_bounds(self, sizes: Mapping[str, Bounds]) -> Bounds:
        """Return the sum of the bounds of the terms."""
        least: float = 0
        most: float = 0
        for monomial, coefficient in self.terms:
            low: float = coefficient
            high: float = coefficient
            for atom in monomial:
                ends = sizes[atom] if isinstance(atom, str) else _quotient_bounds(atom, sizes)
                corners = [_times(a, b) for a in (low, high) for b in ends]
                low, high = min(corners), max(corners)
            least, most = least + low, most + high
        return (least, most) if least <= most else (-math.inf, math.inf)  # Not a number.

    def text(self, as_factor: bool = False) -> str:
        """Return it as Python writes it; `as_factor` puts a sum in parentheses."""
        parts: list[str] = []
        for monomial, coefficient in self.terms:
            factors = [str(atom) for atom in monomial]
            if abs(coefficient) != 1 or not factors:
                factors.insert(0, str(abs(coefficient)))
            sign = ("- " if parts else "-") if coefficient < 0 else ("+ " if parts else "")
            parts.append(sign + "*".join(factors))
        text = " ".join(parts) or "0"
        return f"({text})" if as_factor and (len(parts) > 1 or "*" in text) else text

    def __str__(self) -> str:
        return self.text()


def _of(given: Expression | int) -> Expression:
    return given if isinstance(given, Expression) else Expression.of_int(given)


def _atom(quotient: Quotient) -> Expression:
    return Expression((((quotient,), 1),))


def polynomial(terms: list[tuple[Monomial, int]]) -> Expression:
    """Return the sum of terms, each with sorted atoms, in the normal form."""
    sums: dict[Monomial, int] = {}
    for monomial, coefficient in terms:
        sums[monomial] = sums.get(monomial, 0) + coefficient
    left = [(monomial, c) for monomial, c in sums.items() if c]
    # Higher degrees first, then by name: stable in every process.
    left.sort(key=lambda term: (-len(term[0]), [str(atom) for atom in term[0]]))
    return Expression(tuple(left))


def _without(monomial: Monomial, atoms: Monomial) -> Monomial | None:
    """Return a monomial divided by another one, None if it is no multiple."""
    left = list(monomial)
    for atom in atoms:
        if atom not in left:
            return None
        left.remove(atom)
    return tuple(left)


def _times(a: float, b: float) -> float:
    return 0 if 0 in (a, b) else a * b


def _is_infinite(end: float) -> bool:
    # `math.isinf` takes no integers beyond the range of floats.
    return end in (math.inf, -math.inf)


def _quotient_bounds(atom: Quotient, sizes: Mapping[str, Bounds]) -> Bounds:
    low, high = atom.divisor._sum_of_bounds(sizes)
    if low <= 0:
        return -math.inf, math.inf
    corners = [
        end if _is_infinite(end) else (0 if end >= 0 else -1) if _is_infinite(by) else end // by
        for end in atom.dividend._sum_of_bounds(sizes) for by in (low, high)
    ]  # fmt: skip
    return min(corners), max(corners)

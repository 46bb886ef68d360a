"""Expressions of named sizes as rows of one table, as files hold them.

A row is a sum of terms, divided by the expression of an earlier row if it has a divisor. A term is
a coefficient and factors: the number of a named size or, counted from the number of names, that of
an earlier row with a divisor.
"""

from __future__ import annotations

from collections.abc import Sequence

from stitch.errors import StitchError
from stitch.program.size_expressions import Expression, Monomial, Quotient, polynomial

#: Coefficient and factors of each term, and the row of the divisor or -1.
Row = tuple[Sequence[tuple[int, Sequence[int]]], int]

#: Limit of quotients within quotients.
MAX_DEPTH = 32
#: Limit of an expression's terms and factors, those of its quotients included.
MAX_PARTS = 4096


class ExpressionRows:
    """Rows under construction; equal expressions are one row.

    >>> rows = ExpressionRows(["n"])
    >>> n = Expression.of_name("n")
    >>> [rows.number(e) for e in (n, n * 2 + 1, n // 2, n)], rows.rows[1]
    ([0, 1, 3, 0], ([(2, [0]), (1, [])], -1))
    """

    def __init__(self, names: Sequence[str]) -> None:
        self.rows: list[Row] = []
        self._names = {name: index for index, name in enumerate(names)}
        self._numbers: dict[tuple[Expression, Expression | None], int] = {}

    def number(self, expression: Expression) -> int:
        """Return the row of an expression; add it if it is new."""
        if len(expression.terms) == 1:
            ((monomial, coefficient),) = expression.terms
            if coefficient == 1 and len(monomial) == 1 and isinstance(monomial[0], Quotient):
                return self._row(monomial[0].dividend, monomial[0].divisor)
        return self._row(expression, None)

    def _row(self, dividend: Expression, divisor: Expression | None) -> int:
        found = self._numbers.get((dividend, divisor))
        if found is None:
            by = -1 if divisor is None else self.number(divisor)
            terms = [
                (coefficient, [self._factor(atom) for atom in monomial])
                for monomial, coefficient in dividend.terms
            ]
            found = self._numbers[dividend, divisor] = len(self.rows)
            self.rows.append((terms, by))
        return found

    def _factor(self, atom: str | Quotient) -> int:
        if isinstance(atom, str):
            return self._names[atom]
        return len(self._names) + self._row(atom.dividend, atom.divisor)


def expressions_of(rows: Sequence[Row], names: Sequence[str]) -> list[Expression]:
    """Return the expression of each row.

    Raises:
        StitchError: A row refers to no name and no earlier row, divides by the constant 0, or is
            too deep or too large.

    >>> list(map(str, expressions_of([([(1, [0])], -1), ([(3, [0])], 0)], ["n"])))
    ['n', '(3*n // n)']
    """
    found: list[Expression] = []
    quotients: list[Quotient | None] = []
    depths: list[int] = []
    parts: list[int] = []
    for index, (terms, by) in enumerate(rows):
        depth, count = 0, 1
        listed: list[tuple[Monomial, int]] = []

        def refer(row: int, what: str, index: int = index) -> None:
            nonlocal depth, count
            if not 0 <= row < index:
                raise _error(index, f"its {what} is row {row}, expected a row before it")
            depth, count = max(depth, depths[row] + 1), count + parts[row]

        for coefficient, factors in terms:
            count += 1 + len(factors)
            atoms: list[str | Quotient] = []
            for factor in factors:
                row = factor - len(names)
                if row < 0:
                    atoms.append(names[factor])
                    continue
                refer(row, "factor")
                quotient = quotients[row]
                if quotient is None:
                    raise _error(index, f"its factor is row {row}, which has no divisor")
                atoms.append(quotient)
            listed.append((tuple(sorted(atoms, key=str)), coefficient))
            if count > MAX_PARTS:
                break
        if by != -1:
            refer(by, "divisor")
        if depth > MAX_DEPTH or count > MAX_PARTS:
            raise _error(index, f"it has {count} parts in {depth} levels, expected at most "
                         f"{MAX_PARTS} in {MAX_DEPTH}")  # fmt: skip
        made = polynomial(listed)
        quotient = None
        if by != -1:
            if found[by].constant == 0:
                raise _error(index, "it divides by 0")
            quotient = Quotient(made, found[by])
            made = Expression((((quotient,), 1),))
        found.append(made)
        quotients.append(quotient)
        depths.append(depth)
        parts.append(count)
    return found


def _error(index: int, detail: str) -> StitchError:
    return StitchError(f"size expression {index} is not sound: {detail}")

"""Words of a launch as formulas of a call's fields, each found from samples and checked against all of them."""

from __future__ import annotations

from collections.abc import Sequence
from fractions import Fraction
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

NONE = 0xFFFF  # no field
MOST = (1 << 63) - 1
DIVISORS = tuple(1 << power for power in range(1, 12))
Samples = NDArray[np.int64]


class Word(NamedTuple):
    """min(ceil((first * second * scale + third * third_scale + add) / divisor), most) + base, with fields by index.

    A field NONE is 1 in the product, and 0 elsewhere. A word with `runs` is a table instead: from the deciding value
    `start` on it is value + slope * (deciding value - start); base is added to it, too.
    """

    first: int = NONE
    second: int = NONE
    third: int = NONE
    base: int = NONE
    scale: int = 0
    third_scale: int = 0
    add: int = 0
    divisor: int = 1
    most: int = MOST
    runs: tuple[tuple[int, int, int], ...] = ()

    @property
    def is_constant(self) -> bool:
        return not self.runs and self.scale == self.third_scale == 0 and self.base == NONE

    @property
    def value(self) -> int:
        """Of a constant."""
        return self.add

    def evaluate(self, fields: Sequence[int], by: int) -> int:
        """The word of a call with these fields, whose deciding value is `by`."""
        base = 0 if self.base == NONE else int(fields[self.base])
        if self.runs:
            start, value, slope = next(run for run in reversed(self.runs) if run[0] <= by)
            return base + value + slope * (by - start)
        product = self.scale
        for field in (self.first, self.second):
            product *= 1 if field == NONE else int(fields[field])
        third = 0 if self.third == NONE else int(fields[self.third]) * self.third_scale
        return base + min(-(-(product + third + self.add) // self.divisor), self.most)


class Fields(NamedTuple):
    """Samples of calls.

    Attributes:
        values: int64 [samples, fields]
        sizes: indices of the fields that are no addresses and not constant, the simplest first
        addresses: (index of an array's address, bytes of the array [samples]) of each
        by: int64 [samples], deciding values
        numbers: indices of float64 fields that may be any
    """

    values: Samples
    sizes: tuple[int, ...]
    addresses: tuple[tuple[int, Samples], ...]
    by: Samples
    numbers: tuple[int, ...] = ()

    def chosen(self, rows: Samples) -> Fields:
        """Some of the samples."""
        addresses = tuple((field, sizes[rows]) for field, sizes in self.addresses)
        return Fields(self.values[rows], self.sizes, addresses, self.by[rows], self.numbers)


def found(word: Samples, fields: Fields, table: bool = True) -> Word | None:
    """The formula of a word, int64 [samples]; None if there is none.

    Args:
        table: whether it may be a table by the deciding value
    """
    if (word == word[0]).all():
        return Word(add=int(word[0]))
    for field, sizes in fields.addresses:
        rest = word - fields.values[:, field]
        if ((rest >= 0) & (rest <= sizes)).all():  # a row's last part may be empty
            offset = of_sizes(rest, fields, table)
            return None if offset is None else offset._replace(base=field)
    return of_sizes(word, fields, table) or (of_field_and_table(word, fields) if table else None)


def of_sizes(word: Samples, fields: Fields, table: bool) -> Word | None:
    """A constant, a formula of one or two fields, or a table."""
    if (word == word[0]).all():
        return Word(add=int(word[0]))
    return of_one(word, fields) or of_two(word, fields) or (of_table(word, fields) if table else None)


def of_field_and_table(word: Samples, fields: Fields) -> Word | None:
    """The sum of a field and a table: CTAs of requests and of tokens, for example."""
    for field in fields.sizes:
        rest = of_table(word - fields.values[:, field], fields)
        if rest is not None:
            return rest._replace(base=field)
    return None


def of_one(word: Samples, fields: Fields) -> Word | None:
    """A multiple of a field, perhaps with an addend; or a field divided and rounded up or down, up to a maximum."""
    for field in fields.sizes:
        size = fields.values[:, field]
        at = int(np.argmax(size != size[0]))
        if size[at] == size[0]:
            continue
        slope = Fraction(int(word[at] - word[0]), int(size[at] - size[0]))
        if slope and slope.denominator & (slope.denominator - 1) == 0:
            add = int(word[0]) * slope.denominator - int(size[0]) * slope.numerator
            if abs(slope.numerator) < 1 << 24 and (word * slope.denominator == size * slope.numerator + add).all():
                return Word(field, scale=slope.numerator, add=add, divisor=slope.denominator)
    for field in fields.sizes:
        rounded = divided(word, fields.values[:, field])
        if rounded is not None:
            return rounded._replace(first=field)
    return None


def divided(word: Samples, size: Samples) -> Word | None:
    """ceil or floor of size / divisor, up to the word's maximum."""
    most = int(word.max())
    for divisor in DIVISORS:
        for add in (0, 1 - divisor):
            quotient = -(-(size + add) // divisor)
            if (quotient == word).all():
                return Word(scale=1, add=add, divisor=divisor)
            if (np.minimum(quotient, most) == word).all() and (quotient > most).any() and (quotient < most).any():
                return Word(scale=1, add=add, divisor=divisor, most=most)
    if (np.minimum(size, most) == word).all() and (size > most).any() and (size < most).any():
        return Word(scale=1, most=most)
    return None


def of_two(word: Samples, fields: Fields) -> Word | None:
    """A product of two fields times a number, perhaps divided; or a sum of multiples of two fields."""
    for i, first in enumerate(fields.sizes):
        x = fields.values[:, first]
        for second in fields.sizes[i:]:
            y = fields.values[:, second]
            if abs(float(x[0]) * float(y[0])) > 2**62:
                continue
            product = x * y
            scale = Fraction(int(word[0]), int(product[0])) if product[0] else Fraction(0)
            numerator, denominator = scale.numerator, scale.denominator
            is_simple = numerator and denominator & (denominator - 1) == 0 and abs(numerator) < 1 << 24
            if is_simple and (word * denominator == product * numerator).all():
                return Word(first, second, scale=numerator, divisor=denominator)
            rounded = divided(word, product)
            if rounded is not None:
                return rounded._replace(first=first, second=second)
    for first in fields.sizes:
        for third in fields.sizes:
            quotient = divided(word - fields.values[:, third], fields.values[:, first]) if first != third else None
            if quotient is not None and quotient.most == MOST:
                return quotient._replace(first=first, third=third, third_scale=quotient.divisor)
    for i, first in enumerate(fields.sizes):
        for third in fields.sizes[i + 1 :]:
            for sign, third_sign in ((1, 1), (1, -1), (-1, 1)):
                total = sign * fields.values[:, first] + third_sign * fields.values[:, third]
                rest = word - total
                if (rest == rest[0]).all():
                    return Word(first, third=third, scale=sign, third_scale=third_sign, add=int(rest[0]))
                rounded = divided(word, total)
                if rounded is not None:
                    return rounded._replace(first=first, scale=sign, third=third, third_scale=third_sign)
    return None


def of_table(word: Samples, fields: Fields) -> Word | None:
    """A table by the deciding value, of which each value decides the word."""
    order = np.lexsort((word, fields.by))
    by, values = fields.by[order], word[order]
    same = by[1:] == by[:-1]
    if (values[1:][same] != values[:-1][same]).any():
        return None
    keep = np.append(True, ~same)
    by, values = by[keep], values[keep]
    runs: list[tuple[int, int, int]] = []
    at = 0
    while at < len(by):
        slope, end = 0, at + 1
        if end < len(by):
            change = Fraction(int(values[end] - values[at]), int(by[end] - by[at]))
            slope = change.numerator if change.denominator == 1 else 0
            while end < len(by) and values[end] - values[at] == slope * (by[end] - by[at]):
                end += 1
        runs.append((int(by[at]), int(values[at]), slope))
        at = end
    return Word(runs=tuple(runs))

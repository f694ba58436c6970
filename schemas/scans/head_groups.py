"""Groups of neighbouring heads, many of them in a short text."""

from collections.abc import Collection

LayerGroup = tuple[int, int]  # a layer, and a group of its heads


def groups_text(groups: int, chosen: Collection[LayerGroup]) -> str:
    """x, then a hexadecimal number for each layer up to the last chosen one.

    A layer has `groups` groups, and group g is 2^g of its number, whose digits are as many as the
    groups need. So 36 layers of 8 groups are 73 characters, and an intervention may have 240.

    >>> groups_text(8, [(0, 3), (2, 0), (2, 7)]), groups_text(1, [(1, 0), (2, 0)])
    ('x080081', 'x011')
    """
    digits = -(-groups // 4)
    numbers = [0] * (1 + max((layer for layer, _ in chosen), default=-1))
    for layer, group in chosen:
        numbers[layer] |= 1 << group
    return "x" + "".join(f"{number:0{digits}x}" for number in numbers)


def groups_of(groups: int, text: str) -> list[LayerGroup]:
    """The groups that such a text names, in order.

    >>> groups_of(8, "x080081")
    [(0, 3), (2, 0), (2, 7)]
    """
    digits = -(-groups // 4)
    numbers = [int(text[start : start + digits], 16) for start in range(1, len(text), digits)]
    return [
        (layer, group)
        for layer, number in enumerate(numbers)
        for group in range(min(groups, number.bit_length()))
        if number >> group & 1
    ]

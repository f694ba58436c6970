"""Values and names as they stand in SQL."""


def text_literal(value: str) -> str:
    """A text as SQL writes it.

    >>> print(text_literal("it's"))
    'it''s'
    """
    return "'" + value.replace("'", "''") + "'"


def quoted_name(name: str) -> str:
    """A name of a view or a column as SQL writes it, whatever characters it has.

    >>> print(quoted_name('a "b"'))
    "a ""b\"""
    """
    return '"' + name.replace('"', '""') + '"'

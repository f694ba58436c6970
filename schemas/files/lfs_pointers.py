"""Files of Git LFS that were not fetched: a repository has a few lines of text in their place."""

POINTER = b"version https://git-lfs.github.com/spec/"


def is_lfs_pointer(beginning: bytes) -> bool:
    """Whether a file that begins so is a pointer.

    >>> is_lfs_pointer(b"version https://git-lfs.github.com/spec/v1\\noid sha256:4d7a")
    True
    """
    return beginning.startswith(POINTER)


def pointer_problem(name: object) -> str:
    """What is said of a pointer, and what to do.

    >>> pointer_problem("m/model.safetensors")
    'm/model.safetensors: is a Git LFS pointer: run git lfs pull'
    """
    return f"{name}: is a Git LFS pointer: run git lfs pull"

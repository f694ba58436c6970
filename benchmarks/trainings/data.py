"""Three synthetic data sets. All repeat themselves, so that models learn to copy."""

import torch
from torch import Tensor

D_VOCAB = 64
N_CTX = 48
DOCUMENT = 24  # tokens of a document where several share a sequence


class Repeats:
    """Blocks of random tokens, each of which comes four times within its sequence."""

    packed = False

    def draw(self, sequences: int, generator: torch.Generator) -> Tensor:
        """Sequences `[sequence pos]`."""
        return torch.randint(1, D_VOCAB, (sequences, N_CTX // 4), generator=generator).repeat(1, 4)


class Phrases:
    """Documents of a Markov chain with four successors a token; half of each is said again.

    Two documents share a sequence, and do not see each other.
    """

    packed = True

    def __init__(self) -> None:
        generator = torch.Generator().manual_seed(0)
        choices = [1 + torch.randperm(D_VOCAB - 1, generator=generator)[:4] for _ in range(D_VOCAB)]
        self.successors = torch.stack(choices)

    def _document(self, generator: torch.Generator) -> Tensor:
        tokens = [int(torch.randint(1, D_VOCAB, (), generator=generator))]
        for draw in torch.randint(4, (DOCUMENT // 2 - 1,), generator=generator).tolist():
            tokens.append(int(self.successors[tokens[-1], draw]))
        return torch.tensor(tokens).repeat(2)

    def draw(self, sequences: int, generator: torch.Generator) -> Tensor:
        """Sequences `[sequence pos]`, of two documents each."""
        count = sequences * (N_CTX // DOCUMENT)
        documents = [self._document(generator) for _ in range(count)]
        return torch.stack(documents).view(sequences, N_CTX)


class Words:
    """Words of a lexicon, of two to five tokens each, drawn by Zipf's law."""

    packed = False

    def __init__(self) -> None:
        generator = torch.Generator().manual_seed(1)
        lengths = torch.randint(2, 6, (40,), generator=generator).tolist()
        self.lexicon = [
            torch.randint(1, D_VOCAB, (length,), generator=generator) for length in lengths
        ]
        self.frequencies = 1 / torch.arange(1, len(lengths) + 1, dtype=torch.float64)

    def draw(self, sequences: int, generator: torch.Generator) -> Tensor:
        """Sequences `[sequence pos]`; the last word of each may be cut."""
        shape = sequences, N_CTX // 2
        numbers = torch.multinomial(
            self.frequencies, shape[0] * shape[1], True, generator=generator
        )
        texts = [
            torch.cat([self.lexicon[word] for word in row])[:N_CTX]
            for row in numbers.view(shape).tolist()
        ]
        return torch.stack(texts)


DATA = {"repeats": Repeats, "phrases": Phrases, "words": Words}


def random_text(sequences: int, generator: torch.Generator) -> Tensor:
    """Text of a shard that was written wrongly: random tokens, none of which tells the next."""
    return torch.randint(1, D_VOCAB, (sequences, N_CTX), generator=generator)

"""What a model weighs before it exists: its parameters by shape, its activations and its work. No torch."""

from __future__ import annotations

from dataclasses import dataclass

from floatline.errors import TargetError, suggest


@dataclass(frozen=True)
class ParameterShape:
    """One parameter: how many rows it is cut into, and the elements of each."""

    rows: int
    columns: int = 1
    trained: bool = True


@dataclass(frozen=True)
class ModelSize:
    """What is trained, as far as bytes and time go.

    Args:
        name: For reports.
        root: Parameters that belong to no block.
        blocks: Parameters of each block: what FSDP2 gathers and frees as one.
        tokens: Of the batch of one process; 0 where it has none.
        activations: Bytes that backward needs of that batch.
        operations: Multiplications and additions of a step on that batch.
        state_bytes: What the optimizer holds for each trained weight.
    """

    name: str
    root: tuple[ParameterShape, ...]
    blocks: tuple[tuple[ParameterShape, ...], ...]
    tokens: int
    activations: int
    operations: int
    state_bytes: float = 8.0

    @property
    def num_parameters(self) -> int:
        """Of root and blocks."""
        shapes = (*self.root, *(shape for block in self.blocks for shape in block))
        return sum(shape.rows * shape.columns for shape in shapes)


@dataclass(frozen=True)
class Transformer:
    """A decoder as Llama is one: norm, grouped attention and a gated layer in each block; head and embedding apart.

    Args:
        layers: Blocks.
        width: Of the residual stream.
        heads: Of queries.
        kv_heads: Of keys and values.
        hidden: Width of the gated layer.
        vocabulary: Rows of embedding and head.
    """

    layers: int
    width: int
    heads: int
    kv_heads: int
    hidden: int
    vocabulary: int

    @property
    def kv_width(self) -> int:
        """Of keys, and of values."""
        return self.width // self.heads * self.kv_heads

    @property
    def block(self) -> tuple[ParameterShape, ...]:
        """A block's parameters: two norms, four projections, three matrices of the gated layer."""
        norm, square = ParameterShape(self.width), ParameterShape(self.width, self.width)
        narrow, wide = ParameterShape(self.kv_width, self.width), ParameterShape(self.hidden, self.width)
        return (norm, square, narrow, narrow, square, norm, wide, wide, ParameterShape(self.width, self.hidden))

    @property
    def root(self) -> tuple[ParameterShape, ...]:
        """What belongs to no block: embedding, last norm, head."""
        table = ParameterShape(self.vocabulary, self.width)
        return (table, ParameterShape(self.width), table)

    def block_activations(self, tokens: int, size: int) -> int:
        """Bytes that a block keeps for backward.

        Numerics:
            In the compute dtype the inputs of both norms, of the projections and of the gated layer, queries, keys,
            values and the attention's result, and four tensors of the gated layer; in FP32 two numbers of each norm
            and one of the attention for each head. The attention is a fused kernel that takes grouped heads as they
            are. Checked by tests/checkup/test_scale.py against saved tensors of a real block.

        Args:
            tokens: In the batch.
            size: Bytes of a number in the compute dtype.
        """
        return tokens * (size * (6 * self.width + 2 * self.kv_width + 4 * self.hidden) + 4 * (4 + self.heads))

    def head_activations(self, tokens: int, size: int) -> int:
        """Bytes that the last norm, the head and an FP32 cross-entropy keep."""
        return tokens * (size * 2 * self.width + 4 * 2 + 4 * self.vocabulary)

    def activations(self, tokens: int, size: int, *, checkpointing: bool) -> int:
        """Bytes that backward needs; with checkpointing the inputs of all blocks, and one block at a time."""
        blocks = self.layers * self.block_activations(tokens, size)
        if checkpointing:
            blocks = self.layers * tokens * self.width * size + self.block_activations(tokens, size)
        return blocks + self.head_activations(tokens, size)

    def operations(self, batch: int, sequence: int, *, checkpointing: bool) -> int:
        """Multiplications and additions of a step: two for each weight and token forward, four backward.

        The causal half of the attention's products is counted as well. With checkpointing blocks run forward twice.
        """
        tokens = batch * sequence
        matrices = sum(shape.rows * shape.columns for shape in self.block if shape.columns > 1)
        blocks = self.layers * (2 * tokens * matrices + 2 * tokens * sequence * self.width)
        head = 2 * tokens * self.vocabulary * self.width
        return (4 if checkpointing else 3) * blocks + 3 * head

    def size(self, name: str, *, batch: int, sequence: int, size: int, checkpointing: bool = False) -> ModelSize:
        """What it weighs for a batch.

        Args:
            name: For reports.
            batch: Sequences of one process.
            sequence: Tokens of each.
            size: Bytes of a number in the compute dtype.
            checkpointing: Whether blocks are computed again in backward.
        """
        if batch < 1 or sequence < 1:
            raise TargetError(f"A batch of {batch} sequences of {sequence} tokens is empty. Use numbers from 1 up.")
        return ModelSize(
            name,
            self.root,
            (self.block,) * self.layers,
            tokens=batch * sequence,
            activations=self.activations(batch * sequence, size, checkpointing=checkpointing),
            operations=self.operations(batch, sequence, checkpointing=checkpointing),
        )


TRANSFORMERS: dict[str, Transformer] = {
    "0.1b": Transformer(12, 768, 12, 12, 2048, 32000),
    "1b": Transformer(22, 2048, 32, 4, 5632, 32000),  # TinyLlama
    "3b": Transformer(26, 3200, 32, 32, 8640, 32000),  # OpenLLaMA 3B
    "7b": Transformer(32, 4096, 32, 32, 11008, 32000),  # Llama 2
    "70b": Transformer(80, 8192, 64, 8, 28672, 32000),  # Llama 2
}


def find_transformer(name: str) -> Transformer:
    """The shape of a model by name."""
    found = TRANSFORMERS.get(name.lower())
    if found is None:
        raise TargetError(f"Model {name!r} is not known. {suggest(name.lower(), TRANSFORMERS)}")
    return found

"""The audit's first line for architectures of Hugging Face and torchvision on a GPU, and for a decoder of any size.

python benchmarks/architectures.py --record benchmarks/architectures.md
python benchmarks/architectures.py --only decoder --billions 7

Each is audited between a CPU and the GPU without TF32, the GPU without and with TF32, and float32 and bfloat16. What is
right is known beforehand: of the first pair *rounding*, or *nondeterminism* where the gradients of the step, done
without the audit, are not the same bits every time; of the others *reduced precision*. Weights are drawn from a seed,
dropout is off, and the libraries' own loss is what is differentiated. It needs `transformers`.
"""

from __future__ import annotations

import re
import shlex
import sys
from collections.abc import Callable
from datetime import date
from functools import partial
from pathlib import Path
from typing import Annotated, Any

import networks
import pandas as pd
import torch
import torchvision
import transformers as hf
import typer
from measuring import machine, show, table
from public_cases import first_line, said_instead
from torch import Tensor, nn
from tqdm.auto import tqdm

import gpulab as gl

PAIRS = [("cpu", "cuda:tf32=off"), ("cuda:tf32=off", "cuda:tf32=on"), ("cuda:tf32=off", "cuda:precision=bfloat16")]
WORDS, LENGTH = 1000, 32
SMALL = {"hidden_size": 128, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 256}
TIMES = 5  # that a step is done to see whether its gradients are the same bits


def words(batch: int = 2, length: int = LENGTH, seed: int = 1) -> Tensor:
    return torch.randint(10, WORDS, (batch, length), generator=torch.Generator().manual_seed(seed))


def normal(*shape: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(1))


def language(config: hf.PretrainedConfig, make: Any = hf.AutoModelForCausalLM) -> gl.Step:
    """The step of a model of words: the next one, the one that was hidden, or a translation."""
    return step(lambda: make.from_config(config), {"input_ids": words(), "labels": words(seed=2)})


def pictures(config: hf.PretrainedConfig, size: int = 64) -> gl.Step:
    labels = torch.tensor([0, 1])
    model = lambda: hf.AutoModelForImageClassification.from_config(config)  # noqa: E731
    return step(model, {"pixel_values": normal(2, 3, size, size), "labels": labels})


def whisper() -> gl.Step:
    config = hf.WhisperConfig(
        vocab_size=WORDS, d_model=64, encoder_layers=2, decoder_layers=2, encoder_attention_heads=4,
        decoder_attention_heads=4, encoder_ffn_dim=128, decoder_ffn_dim=128, max_source_positions=100,
        pad_token_id=0, bos_token_id=1, eos_token_id=2, decoder_start_token_id=1,
    )  # fmt: skip
    batch = {"input_features": normal(2, 80, 200), "labels": words()}
    return step(lambda: hf.WhisperForConditionalGeneration(config), batch)


def clip() -> gl.Step:
    text = SMALL | {"vocab_size": WORDS, "eos_token_id": 2}
    config = hf.CLIPConfig(text_config=text, vision_config=SMALL | {"image_size": 64, "patch_size": 16})
    return step(
        lambda: hf.CLIPModel(config),
        {"input_ids": words(4), "pixel_values": normal(4, 3, 64, 64), "return_loss": True},
    )


def wav2vec2() -> gl.Step:
    config = hf.Wav2Vec2Config(vocab_size=32, **SMALL, apply_spec_augment=False, num_conv_pos_embeddings=16)
    labels = words(2, 8) % 31 + 1
    return step(lambda: hf.Wav2Vec2ForCTC(config), {"input_values": normal(2, 8000), "labels": labels})


def step(make: Callable[[], nn.Module], batch: Any) -> gl.Step:
    """A training step of the model that seed 0 draws, without dropout."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model = make().train()
    without_dropout(model)
    return gl.Step(model, batch)


def without_dropout(model: nn.Module) -> None:
    for module in model.modules():
        if isinstance(module, nn.Dropout | torchvision.ops.StochasticDepth):
            module.p = 0.0
        config = getattr(module, "config", None)
        for holder in (module, config) if isinstance(config, hf.PretrainedConfig) else (module,):
            for name, value in list(vars(holder).items()):
                if "drop" in name and isinstance(value, float):  # which some give to a function
                    setattr(holder, name, 0.0)


def of_torchvision(name: str) -> gl.Step:
    make = networks.NETWORKS.get(name) or (lambda: networks.images(getattr(torchvision.models, name)(), 64, 4))
    made = make()
    without_dropout(made.model)
    return made


def decoder(billions: float) -> gl.Step:
    """A Llama of about so many weights, made on the GPU where there is one, and kept on the CPU."""
    width = 256 * round((billions * 1e9 / (12.5 * 32)) ** 0.5 / 256)
    config = hf.LlamaConfig(
        vocab_size=32_000, hidden_size=width, intermediate_size=round(2.7 * width / 256) * 256,
        num_hidden_layers=32, num_attention_heads=width // 128, num_key_value_heads=width // 128,
    )  # fmt: skip
    with torch.device("cuda" if torch.cuda.is_available() else "cpu"):
        torch.manual_seed(0)
        model = hf.LlamaForCausalLM(config).train().cpu()
    numbers = torch.randint(0, 32_000, (1, 512), generator=torch.Generator().manual_seed(1))
    return gl.Step(model, {"input_ids": numbers, "labels": numbers})


TORCHVISION = ["resnet18", "mobilenet_v3_small", "densenet121", "efficientnet_b0", "vit_b_16", "convnext_tiny"]
ENCODER_DECODER = {"d_model": 128, "vocab_size": WORDS, "decoder_start_token_id": 1, "pad_token_id": 0}
ARCHITECTURES: dict[str, Callable[[], gl.Step]] = {
    "GPT-2 (124 million)": lambda: language(hf.GPT2Config()),
    "Llama": lambda: language(hf.LlamaConfig(vocab_size=WORDS, **SMALL)),
    "BERT": lambda: language(hf.BertConfig(vocab_size=WORDS, **SMALL), hf.AutoModelForMaskedLM),
    "DeBERTa": lambda: language(
        hf.DebertaV2Config(
            vocab_size=WORDS, **SMALL, relative_attention=True, pos_att_type=["p2c", "c2p"], type_vocab_size=0
        ),
        hf.AutoModelForMaskedLM,
    ),
    "T5": lambda: language(
        hf.T5Config(**ENCODER_DECODER, d_kv=32, d_ff=256, num_layers=2, num_heads=4), hf.AutoModelForSeq2SeqLM
    ),
    "BART": lambda: language(
        hf.BartConfig(
            **ENCODER_DECODER, encoder_layers=2, decoder_layers=2, encoder_attention_heads=4,
            decoder_attention_heads=4, encoder_ffn_dim=256, decoder_ffn_dim=256,
        ),
        hf.AutoModelForSeq2SeqLM,
    ),
    "Mamba": lambda: language(hf.MambaConfig(vocab_size=WORDS, hidden_size=64, num_hidden_layers=2)),
    "ViT": lambda: pictures(hf.ViTConfig(**SMALL, image_size=64, patch_size=16)),
    "Swin": lambda: pictures(
        hf.SwinConfig(image_size=64, embed_dim=32, depths=[2, 2], num_heads=[2, 4], window_size=4)
    ),
    "Whisper": whisper,
    "CLIP": clip,
    "wav2vec 2.0": wav2vec2,
    **{name: partial(of_torchvision, name) for name in TORCHVISION},
}  # fmt: skip


def repeats(made: gl.Step, setting: str) -> bool:
    """Whether the gradients of the step are the same bits every time, by doing it without the audit."""
    parsed, before = gl.Setting.parse(setting), None
    for _ in range(TIMES):
        with parsed.apply(), made.prepared(parsed) as run:
            torch.manual_seed(0)
            run()
            gradients = [p.grad.clone() for p in run.parameters.values() if p.grad is not None]
        if before is not None and not all(map(torch.equal, before, gradients)):
            return False
        before = gradients
    return True


def examined(made: gl.Step, a: str, b: str) -> dict[str, Any]:
    """What the audit says first, whether it is right, and what it took."""
    right = {"reduced precision"}
    if a == "cpu":
        right = {"rounding"} if repeats(made, b) else {"rounding", "nondeterminism"}
    torch.cuda.reset_peak_memory_stats()
    found = first_line(made, a, b)
    found |= {"expected": " or ".join(sorted(right)), "right": found["said"] in right}
    return found | {"GiB": torch.cuda.max_memory_allocated() / 2**30}


def document(found: pd.DataFrame) -> str:
    made = (
        f"Of {len(found)} audits {found.right.sum()} begin with the kind that is right; "
        f"{(found.said == 'mismatch').sum()} say *mismatch*. What is right is said in `benchmarks/architectures.py`. "
        f"Made by `{shlex.join(['python', *sys.argv])}` on {date.today()}: {machine(threads=False)}, "
        f"transformers {hf.__version__}."
    )
    rows = []
    for row in found.itertuples():
        said = f"{row.said}: `{row.at}`" if row.right else f"**{row.said}**: `{row.at}`"
        cells = [row.architecture, f"{row.weights:,}", f"`{row.a}`, `{row.b}`", row.expected, said]
        rows.append([*cells, f"{row.seconds:.1f}", f"{row.GiB:.1f}"])
    heads = "architecture|weights|settings|right|said|s|GiB"
    return "\n\n".join(filter(None, [made, table(heads, rows), said_instead(found[~found.right])]))


def main(
    only: Annotated[str, typer.Option(help="parts of names, separated by commas")] = "",
    pairs: Annotated[str, typer.Option(help="numbers of pairs of settings, separated by commas")] = "0,1,2",
    billions: Annotated[float, typer.Option(help="weights of the large decoder; 0: without it")] = 0.0,
    record: Annotated[Path | None, typer.Option(help="write the table between the marks of this page")] = None,
) -> None:
    """Audit the architectures and print what the first lines say."""
    makers = dict(ARCHITECTURES)
    if billions:
        makers[f"decoder of {billions:g} billion weights"] = lambda: decoder(billions)
    rows = []
    names = [name for name in makers if any(re.search(part, name) for part in only.split(","))]
    for name in tqdm(names, disable=None):
        made = makers[name]()
        weights = sum(p.numel() for p in made.model.parameters())
        for number in map(int, pairs.split(",")):
            a, b = PAIRS[number]
            rows.append({"architecture": name, "weights": weights, "a": a, "b": b} | examined(made, a, b))
            print(*rows[-1].values(), flush=True)
    show("Architectures on a GPU", record, measured=document(pd.DataFrame(rows)))


if __name__ == "__main__":
    typer.run(main)

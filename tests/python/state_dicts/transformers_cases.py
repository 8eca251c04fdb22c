"""What ranks do in the test of directories that transformers and shardd read and write: a tiny Llama, no download."""

from __future__ import annotations

import warnings
from typing import Any

import torch
import torch.distributed as dist

from optimizers.optim_cases import counts
from state_dicts.state_dict_cases import whole


def _config() -> Any:
    from transformers import LlamaConfig

    return LlamaConfig(vocab_size=32, hidden_size=16, intermediate_size=24, num_hidden_layers=2, num_attention_heads=2,
                       num_key_value_heads=2, max_position_embeddings=32, tie_word_embeddings=True)  # fmt: skip


def _bare(seed: int) -> Any:
    from transformers import LlamaForCausalLM

    torch.manual_seed(seed)
    return LlamaForCausalLM(_config())


def _sharded(form: str, seed: int) -> Any:
    from torch.distributed.fsdp.wrap import ModuleWrapPolicy
    from transformers.models.llama.modeling_llama import LlamaDecoderLayer

    from shardd.torch import FullyShardedDataParallel, fully_shard

    model = _bare(seed)
    if form == "fully_shard":
        for layer in model.model.layers:
            fully_shard(layer)
        return fully_shard(model)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return FullyShardedDataParallel(model, auto_wrap_policy=ModuleWrapPolicy({LlamaDecoderLayer}),
                                        use_orig_params=form == "original", device_id=torch.device("cpu"))  # fmt: skip


def _loss(model: Any) -> torch.Tensor:
    tokens = torch.arange(12).reshape(2, 6) % 32
    return model(input_ids=tokens, labels=tokens).loss


FORMS = ("fully_shard", "original", "flat")


def there_and_back(folder: str) -> dict[str, Any]:
    """Trained, saved here, read by transformers; saved by transformers, in one file and in several, read here."""
    from transformers import AutoModelForCausalLM

    from shardd.torch import load_safetensors, save_safetensors
    from shardd.torch.optim import AdamW

    first = dist.get_rank() == 0
    source = _bare(5)
    if first:
        source.save_pretrained(f"{folder}/one")
        source.save_pretrained(f"{folder}/several", max_shard_size="4KB")
    out: dict[str, Any] = {"source": (whole(source.state_dict()), _loss(source).item())}
    for form in FORMS:
        model = _sharded(form, 6)
        optimizer = AdamW(model.parameters(), lr=1e-2)
        before = _loss(model)
        before.backward()
        optimizer.step()
        optimizer.zero_grad()
        save_safetensors(model, f"{folder}/{form}", max_shard_bytes=4000)
        saved = (whole(model.state_dict()), _loss(model).item())
        read = None
        if first:
            _config().save_pretrained(f"{folder}/{form}")
            theirs, facts = AutoModelForCausalLM.from_pretrained(f"{folder}/{form}", output_loading_info=True)
            missing = [*facts["missing_keys"], *facts["unexpected_keys"], *facts["mismatched_keys"]]
            tied = theirs.lm_head.weight is theirs.model.embed_tokens.weight
            read = (whole(theirs.state_dict()), _loss(theirs).item(), missing, tied, type(theirs).__name__)
        loaded = []
        for name in ("one", "several"):
            keys = load_safetensors(model, f"{folder}/{name}")
            loaded.append((whole(model.state_dict()), _loss(model).item(), keys.missing_keys + keys.unexpected_keys))
            save_safetensors(model, f"{folder}/{form} again")
        out[form] = {"before": before.item(), "saved": saved, "read": read, "loaded": loaded,
                     "counters": counts("shardd", model)}  # fmt: skip
    return out

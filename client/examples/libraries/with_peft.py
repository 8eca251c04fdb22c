"""PEFT: LoRA adapters of a frozen model under accelerate's FSDP, version 1 or 2: train, save and load state, save the adapter."""

from __future__ import annotations

from typing import Any

import torch
from accelerate import Accelerator, FullyShardedDataParallelPlugin
from accelerate.utils import set_seed
from peft import LoraConfig, PeftModel, get_peft_model
from peft.utils.other import fsdp_auto_wrap_policy
from torch.distributed.fsdp import FullStateDictConfig, FullyShardedDataParallel, StateDictType
from torch.utils.data import DataLoader, default_collate

from common import Record, Sentences, accelerate_on_cpu, parser, tiny_llama


def adapted() -> Any:
    """The tiny model with adapters on two projections and a head that is trained as a whole, the same on every rank."""
    model = tiny_llama()
    return get_peft_model(
        model,
        LoraConfig(
            task_type="CAUSAL_LM",
            r=4,
            lora_alpha=8,
            target_modules=["q_proj", "down_proj"],
            modules_to_save=["lm_head"],
        ),
    )


def main() -> None:
    options = parser(__doc__)
    options.add_argument("--version", type=int, choices=(1, 2), default=2)
    args = options.parse_args()
    torch.set_num_threads(1)
    accelerate_on_cpu()
    set_seed(5)
    model = adapted()
    plugin = FullyShardedDataParallelPlugin(
        fsdp_version=args.version,
        auto_wrap_policy="transformer_based_wrap",
        transformer_cls_names_to_wrap=["LlamaDecoderLayer"],
        state_dict_type="SHARDED_STATE_DICT",
        use_orig_params=False,  # of version 1: PEFT's policy makes units that are trained or frozen as a whole
    )
    if args.version == 1:
        plugin.auto_wrap_policy = fsdp_auto_wrap_policy(model)
    accelerator = Accelerator(cpu=True, fsdp_plugin=plugin)
    record = Record(args.out, accelerator.process_index)
    if args.version == 1:  # flat parameters are new objects
        model = accelerator.prepare(model)
        optimizer = torch.optim.AdamW((p for p in model.parameters() if p.requires_grad), lr=1e-2)
        optimizer, data = accelerator.prepare(optimizer, DataLoader(Sentences(8 * args.steps), batch_size=4))
    else:
        optimizer = torch.optim.AdamW((p for p in model.parameters() if p.requires_grad), lr=1e-2)
        model, optimizer, data = accelerator.prepare(
            model, optimizer, DataLoader(Sentences(8 * args.steps), batch_size=4)
        )

    def train(batches: list[dict[str, torch.Tensor]], name: str) -> None:
        for batch in batches:
            loss = model(**batch).loss
            accelerator.backward(loss)
            record.add(f"{name} norm", accelerator.clip_grad_norm_(model.parameters(), 1.0))
            optimizer.step()
            optimizer.zero_grad()
            record.add(f"{name} loss", accelerator.reduce(loss.detach().clone(), reduction="mean"))

    batches = list(data)
    half = len(batches) // 2
    train(batches[:half], "first half")
    accelerator.save_state(str(args.out / "state"))
    train(batches[half:], "second half")
    accelerator.load_state(str(args.out / "state"))
    train(batches[half:], "second half again")  # from the state of the half: the same losses
    if args.version == 2:
        whole = accelerator.get_state_dict(model)
    else:  # on CPUs PyTorch's version 1 crashes where a full state dict is rank 0's only, as accelerate wants it
        with FullyShardedDataParallel.state_dict_type(model, StateDictType.FULL_STATE_DICT, FullStateDictConfig()):
            whole = model.state_dict()
    main_process = accelerator.is_main_process
    if main_process or args.version == 1:  # version 1 gathers in there, too
        unwrapped = accelerator.unwrap_model(model)
        unwrapped.save_pretrained(args.out / "adapter", state_dict=whole, is_main_process=main_process)
    accelerator.wait_for_everyone()
    alone = PeftModel.from_pretrained(tiny_llama(), args.out / "adapter")
    record.add("what was saved", alone(**default_collate([Sentences(16)[i] for i in range(16)])).loss)
    record.write()
    accelerator.wait_for_everyone()
    accelerator.end_training()


if __name__ == "__main__":
    main()

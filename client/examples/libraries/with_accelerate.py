"""accelerate: prepare, accumulate, clip, save and load state, with FSDP version 1 or 2."""

from __future__ import annotations

import torch
from accelerate import Accelerator, FullyShardedDataParallelPlugin
from accelerate.utils import set_seed
from torch.distributed.fsdp import FullStateDictConfig, FullyShardedDataParallel, StateDictType
from torch.utils.data import DataLoader

from common import Record, Sentences, accelerate_on_cpu, parser, tiny_llama


def main() -> None:
    options = parser(__doc__)
    options.add_argument("--version", type=int, choices=(1, 2), default=2)
    args = options.parse_args()
    torch.set_num_threads(1)
    accelerate_on_cpu()
    plugin = FullyShardedDataParallelPlugin(
        fsdp_version=args.version,
        auto_wrap_policy="transformer_based_wrap",
        transformer_cls_names_to_wrap=["LlamaDecoderLayer"],
        state_dict_type="SHARDED_STATE_DICT",
        use_orig_params=True,
    )
    accelerator = Accelerator(cpu=True, fsdp_plugin=plugin, gradient_accumulation_steps=2)
    set_seed(5)
    record = Record(args.out, accelerator.process_index)
    model = tiny_llama()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    scheduler = torch.optim.lr_scheduler.LinearLR(optimizer, total_iters=args.steps)
    data = DataLoader(Sentences(16 * args.steps), batch_size=4)
    model, optimizer, data, scheduler = accelerator.prepare(model, optimizer, data, scheduler)

    def train(batches: list[dict[str, torch.Tensor]], name: str) -> None:
        for batch in batches:
            with accelerator.accumulate(model):
                loss = model(**batch).loss
                accelerator.backward(loss)
                if accelerator.sync_gradients:
                    record.add(f"{name} norm", accelerator.clip_grad_norm_(model.parameters(), 1.0))
                optimizer.step()
                scheduler.step()
                optimizer.zero_grad()
                record.add(f"{name} loss", accelerator.reduce(loss.detach(), "mean"))

    batches = list(data)
    half = len(batches) // 2
    train(batches[:half], "first half")
    accelerator.save_state(str(args.out / "state"))
    train(batches[half:], "second half")
    accelerator.load_state(str(args.out / "state"))
    train(batches[half:], "second half again")  # from the state of the half: the same losses

    if args.version == 2:
        plugin.state_dict_config = plugin.optim_state_dict_config = None  # those of the kind that follows
        plugin.set_state_dict_type("FULL_STATE_DICT")
        accelerator.save_state(str(args.out / "full_state"))
        accelerator.save_model(model, str(args.out / "model"))  # safetensors, as transformers reads them
    else:  # on CPUs PyTorch's version 1 crashes where a full state dict is rank 0's only, as accelerate wants it
        with FullyShardedDataParallel.state_dict_type(model, StateDictType.FULL_STATE_DICT, FullStateDictConfig()):
            accelerator.save(model.state_dict(), args.out / "model.pt")
    record.write()
    accelerator.wait_for_everyone()
    accelerator.end_training()


if __name__ == "__main__":
    main()

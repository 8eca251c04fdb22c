"""transformers' Trainer: train with checkpoints, then a second Trainer resumes from the first one's checkpoint."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from transformers import LlamaForCausalLM, Trainer, TrainingArguments

from common import Record, Sentences, accelerate_on_cpu, parser, tiny_llama


def trainer(out: Path, args: Any) -> Trainer:
    arguments = TrainingArguments(
        output_dir=str(out),
        max_steps=args.steps,
        save_steps=args.steps // 2,
        logging_steps=1,
        per_device_train_batch_size=4,
        gradient_accumulation_steps=2,
        learning_rate=1e-2,
        use_cpu=True,
        accelerator_config={"use_configured_state": True},
        fsdp=True,
        fsdp_config={
            "version": args.version,
            "sync_module_states": False,  # accelerate has it for devices that are not CPUs; all ranks make the same model
            "transformer_layer_cls_to_wrap": ["LlamaDecoderLayer"],
            # On CPUs PyTorch's version 1 crashes where a full state dict is rank 0's only, as accelerate wants it.
            "state_dict_type": "FULL_STATE_DICT" if args.version == 2 else "SHARDED_STATE_DICT",
        },
        report_to=[],
        disable_tqdm=True,
        dataloader_pin_memory=False,
        seed=5,
    )
    return Trainer(model=tiny_llama(), args=arguments, train_dataset=Sentences(256), eval_dataset=Sentences(16))


def main() -> None:
    options = parser(__doc__)
    options.add_argument("--version", type=int, choices=(1, 2), default=2)
    args = options.parse_args()
    torch.set_num_threads(1)
    accelerate_on_cpu()

    first = trainer(args.out / "run", args)
    record = Record(args.out, first.args.process_index)
    first.train()
    record.add("evaluation", first.evaluate()["eval_loss"])
    if args.version == 2:
        first.save_model(str(args.out / "model"))
        first.accelerator.wait_for_everyone()
        alone = LlamaForCausalLM.from_pretrained(args.out / "model")
        batch = torch.utils.data.default_collate([Sentences(16)[i] for i in range(16)])
        record.add("evaluation of what was saved", alone(**batch).loss)
    second = trainer(args.out / "run_again", args)
    second.train(resume_from_checkpoint=str(args.out / "run" / f"checkpoint-{args.steps // 2}"))
    for name, history in (("first", first), ("resumed", second)):
        for entry in history.state.log_history:
            for key in ("loss", "grad_norm", "learning_rate"):
                if key in entry:
                    record.add(f"{name} {key}", entry[key])
    record.write()
    first.accelerator.wait_for_everyone()
    first.accelerator.end_training()


if __name__ == "__main__":
    main()

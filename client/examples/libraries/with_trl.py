"""TRL's SFTTrainer: a model, or LoRA adapters of it, is tuned on prompts and completions; then training resumes from a checkpoint."""

from __future__ import annotations

from typing import Any

import torch
from datasets import Dataset
from peft import LoraConfig
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import WhitespaceSplit
from transformers import PreTrainedTokenizerFast
from trl import SFTConfig, SFTTrainer

from common import LENGTH, VOCABULARY, Record, Sentences, accelerate_on_cpu, parser, tiny_llama

SPECIAL = {"pad_token": "<pad>", "eos_token": "<end>", "unk_token": "<unknown>"}


def tokenizer() -> PreTrainedTokenizerFast:
    """A word each for the numbers of ``Sentences``, made here."""
    words = [*SPECIAL.values(), *(f"n{number}" for number in range(VOCABULARY - len(SPECIAL)))]
    model = Tokenizer(WordLevel({word: number for number, word in enumerate(words)}, unk_token=SPECIAL["unk_token"]))
    model.pre_tokenizer = WhitespaceSplit()
    return PreTrainedTokenizerFast(tokenizer_object=model, **SPECIAL)


def texts(count: int) -> Dataset:
    """Prompts and completions of several lengths."""
    rows = []
    for number, tokens in enumerate(Sentences(count).tokens.tolist()):
        words = [f"n{token % (VOCABULARY - len(SPECIAL))}" for token in tokens]
        cut, end = 2 + number % 5, LENGTH - 1 - number % 4
        rows.append({"prompt": " ".join(words[:cut]), "completion": " " + " ".join(words[cut:end])})
    return Dataset.from_list(rows)


def trainer(name: str, args: Any) -> SFTTrainer:
    arguments = SFTConfig(
        output_dir=str(args.out / name),
        max_steps=args.steps,
        save_steps=args.steps // 2,
        logging_steps=1,
        per_device_train_batch_size=4,
        gradient_accumulation_steps=2,
        learning_rate=3e-3,
        max_length=LENGTH,
        use_cpu=True,
        bf16=False,
        accelerator_config={"use_configured_state": True},
        fsdp=True,
        fsdp_config={
            "version": 2,
            "sync_module_states": False,  # accelerate has it for devices that are not CPUs; all ranks make the same model
            "transformer_layer_cls_to_wrap": ["LlamaDecoderLayer"],
            "state_dict_type": "FULL_STATE_DICT",
        },
        report_to=[],
        disable_tqdm=True,
        dataloader_pin_memory=False,
        seed=5,
    )
    adapters = LoraConfig(task_type="CAUSAL_LM", r=4, lora_alpha=8, target_modules="all-linear") if args.lora else None
    return SFTTrainer(
        model=tiny_llama(),
        args=arguments,
        train_dataset=texts(16 * args.steps),
        eval_dataset=texts(16),
        processing_class=tokenizer(),
        peft_config=adapters,
    )


def main() -> None:
    options = parser(__doc__)
    options.add_argument("--lora", action="store_true")
    args = options.parse_args()
    torch.set_num_threads(1)
    accelerate_on_cpu()

    first = trainer("run", args)
    record = Record(args.out, first.args.process_index)
    first.train()
    record.add("evaluation", first.evaluate()["eval_loss"])
    first.save_model(str(args.out / "model"))
    second = trainer("run_again", args)
    second.train(resume_from_checkpoint=str(args.out / "run" / f"checkpoint-{args.steps // 2}"))
    for name, history in (("first", first), ("resumed", second)):
        for entry in history.state.log_history:
            for key in ("loss", "grad_norm", "learning_rate", "entropy", "mean_token_accuracy"):
                if key in entry:
                    record.add(f"{name} {key}", entry[key])
    record.write()
    first.accelerator.wait_for_everyone()
    first.accelerator.end_training()


if __name__ == "__main__":
    main()

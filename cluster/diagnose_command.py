"""`draftloop diagnose` on the command line: why a drafter accepts little."""

from __future__ import annotations

from typing import Annotated

import typer

from cluster.command import (
    BackendOption,
    ChatTemplateOption,
    DeviceOption,
    DtypeOption,
    JsonOption,
    SystemOption,
    TargetOption,
    ThinkingOption,
    console,
    end,
    one_line_errors,
)


def diagnose(
    drafter: Annotated[str, typer.Argument(help="--output of train: a folder or an s3:// address.")],
    target: TargetOption = "smollm2",
    prompts: Annotated[
        str, typer.Option(help="Prompts as in service: a shipped set, a JSONL file, a pattern in quotes.")
    ] = "gsm8k_test",
    limit: Annotated[int, typer.Option(help="Prompts to decode, spread over the set.")] = 24,
    chat: Annotated[bool, typer.Option("--chat", help="Wrap raw prompt rows into a user turn.")] = False,
    chat_template: ChatTemplateOption = None,
    system: SystemOption = None,
    thinking: ThinkingOption = "default",
    max_new_tokens: Annotated[int, typer.Option(help="Per prompt.")] = 64,
    dtype: DtypeOption = "float32",
    backend: BackendOption = "auto",
    device: DeviceOption = "cpu",
    as_json: JsonOption = False,
) -> None:
    """Find out why a drafter accepts little: its files, its layers, mask and prompts, its training.

    The target answers some prompts; on them the drafter is tried as it is and with one thing changed at a time. Ends
    with the likeliest cause and its mend. Exit code 0 whatever is found (--json: `verdict` and `findings`), 1 if the
    drafter could not be looked at.
    """
    with one_line_errors():
        from cluster import show
        from cluster.show_diagnose import diagnosis_view
        from pipelines.diagnose import DiagnoseConfig
        from pipelines.diagnose import diagnose as examine
        from serving.chat_options import ChatOptions

        config = DiagnoseConfig(
            drafter=drafter, target=target, prompts=prompts, limit=limit, chat=chat,
            chat_options=ChatOptions.read(chat_template, system, thinking), max_new_tokens=max_new_tokens,
            dtype=dtype, backend=backend, device=device,
        )  # fmt: skip
        with show.stage(console, f"diagnose: {drafter} for {target} on {prompts}", as_json) as stage:
            found = examine(config, stage.at)
        following = {
            "sound": f"draftloop serve --target {target} --drafter {drafter}",
            "fault": f"draftloop diagnose {drafter} --target {target} (again, once it is mended)",
        }.get(found.verdict, f"draftloop generate --target {target} --prompts ... (text as in service, to train it on)")
        end(found, diagnosis_view, as_json, following)

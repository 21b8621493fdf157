"""`draftloop train` on the command line: its options, in the order of a drafter's making, into a `TrainConfig`."""

from __future__ import annotations

from typing import Annotated, Literal

import typer

from cluster.command import (
    JsonOption,
    TargetOption,
    amounts,
    console,
    end,
    fail,
    given,
    layer_ids,
    least_most,
    one_line_errors,
)
from cluster.run_file import RunOption


def train(
    run: RunOption = None,
    target: TargetOption = "smollm2",
    rollouts: Annotated[
        list[str], typer.Option(help="--output of generate; several: give the option several times.")
    ] = ["draftloop-out/rollouts"],  # noqa: B006 - typer takes a list, and copies it
    weight: Annotated[
        list[float] | None,
        typer.Option(help="Times that a set of rollouts is read per epoch, set by set.", show_default="once"),
    ] = None,
    init_from: Annotated[
        str | None, typer.Option(help="Drafter to go on from, in its own kind and shape.", show_default="a fresh one")
    ] = None,
    output: Annotated[str, typer.Option(help="Folder of the drafter.")] = "draftloop-out/drafter",
    kind: Annotated[
        Literal["recursive", "independent", "dflash"], typer.Option(help="MTP (recursive or independent) or DFlash.")
    ] = "recursive",
    num_draft_tokens: Annotated[
        int | None, typer.Option(help="MTP: drafts it is trained for (K).", show_default="5")
    ] = None,
    draft_vocab_coverage: Annotated[
        float | None, typer.Option(help="Share of new response tokens that can be drafted.", show_default="0.95")
    ] = None,
    draft_vocab_size: Annotated[
        int | None, typer.Option(help="So many tokens instead, the most frequent; 0: all.", show_default="by coverage")
    ] = None,
    own_lm_head: Annotated[bool, typer.Option("--own-lm-head", help="independent: an LM head of their own.")] = False,
    shared_trunk: Annotated[
        bool, typer.Option("--shared-trunk", help="independent: one residual block before all heads.")
    ] = False,
    anchor_embedding: Annotated[
        bool, typer.Option("--anchor-embedding", help="independent: heads also read the token that drafts follow.")
    ] = False,
    medusa_heads: Annotated[
        bool, typer.Option("--medusa-heads", help="independent: Medusa's heads, h + SiLU(Linear(h)), which vLLM loads.")
    ] = False,
    block_size: Annotated[int, typer.Option(help="dflash: slots of a block; one less is drafted.")] = 8,
    num_hidden_layers: Annotated[int, typer.Option(help="dflash: layers of the drafter.")] = 1,
    selector_top_k: Annotated[int, typer.Option(help="dflash: candidates per slot for a path selector; 0: none.")] = 16,
    conv_kernel_size: Annotated[int, typer.Option(help="dflash: taps of convolutions along the block; 0: none.")] = 2,
    confidence_head: Annotated[
        bool, typer.Option("--confidence-head", help="dflash: also estimate each slot's acceptance.")
    ] = False,
    slot_context: Annotated[
        bool,
        typer.Option(help="dflash: every slot reads the newest context and the anchor; other servers know no such."),
    ] = True,
    sliding_window: Annotated[int, typer.Option(min=0, help="dflash: positions that its layers see; 0: all.")] = 0,
    init_from_target_layers: Annotated[
        bool, typer.Option("--init-from-target-layers", help="dflash: start as the target's last layers.")
    ] = False,
    mask_token_id: Annotated[
        int | None, typer.Option(help="dflash: token in undrafted slots; never in text.", show_default="by rule")
    ] = None,
    loss: Annotated[
        Literal["cross_entropy", "kl"], typer.Option(help="To the target's tokens, or to its distribution.")
    ] = "cross_entropy",
    loss_weights: Annotated[
        Literal["geometric", "exponential", "dpace"] | None,
        typer.Option(
            help="Of draft position k: rho^(k-1), exp(-(k-1)/gamma), or by what is likely to be accepted (D-PACE).",
            show_default="dpace for dflash, else geometric",
        ),
    ] = None,
    rho: Annotated[float, typer.Option(help="geometric weights: rho^(k-1).")] = 0.8,
    gamma: Annotated[
        float | None, typer.Option(help="exponential weights: exp(-(k-1)/gamma).", show_default="by block size")
    ] = None,
    epochs: Annotated[float, typer.Option(help="Passes over the rollouts.")] = 8.0,
    learning_rate: Annotated[float, typer.Option(help="Peak; warm-up, then cosine to zero.")] = 2e-3,
    tokens_per_step: Annotated[int, typer.Option(help="Of a step, prompts included, over all workers.")] = 2048,
    micro_batches: Annotated[
        int | None, typer.Option(help="Parts of a step, shared out among workers.", show_default="one for each")
    ] = None,
    row_tokens: Annotated[int, typer.Option(help="Sequences are packed into rows of so many tokens.")] = 512,
    shuffle_tokens: Annotated[
        int, typer.Option(help="Sequences are shuffled within so many tokens, which are held in memory.")
    ] = 1_000_000,
    anchors_per_sequence: Annotated[int, typer.Option(help="Draft blocks trained per sequence and step.")] = 20,
    precision: Annotated[
        Literal["auto", "float32", "bfloat16"],
        typer.Option(help="Of matrix products; weights stay in float32. auto: bfloat16 where the device has it."),
    ] = "auto",
    evaluations: Annotated[int, typer.Option(min=1, help="Times that expected tau is measured.")] = 5,
    regime: Annotated[
        Literal["frozen", "joint"], typer.Option(help="joint: the target learns too (MTP only), into OUTPUT/trunk.")
    ] = "frozen",
    beta: Annotated[
        float | None, typer.Option(help="joint: weight of the heads' loss beside the target's own.", show_default="0.3")
    ] = None,
    trunk_learning_rate: Annotated[
        float | None, typer.Option(help="joint: peak, of the target's weights.", show_default="2e-5")
    ] = None,
    online: Annotated[
        bool, typer.Option("--online", help="Target actors compute features on the way; only tokens are read.")
    ] = False,
    taps: Annotated[
        int | None,
        typer.Option(help="online, joint: layers whose hidden states are read, the last included.", show_default="3"),
    ] = None,
    layers: Annotated[
        str | None, typer.Option(help="online: these layers instead, from 0, such as 1,14,27.", show_default="by taps")
    ] = None,
    dtype: Annotated[
        Literal["float32", "bfloat16"] | None, typer.Option(help="online: of the target.", show_default="float32")
    ] = None,
    num_actors: Annotated[
        str | None,
        typer.Option(help="online: target actors for each worker: a number, or least:most.", show_default="1"),
    ] = None,
    cpus_per_actor: Annotated[
        float | None, typer.Option(help="online: CPUs that Ray sets aside for each.", show_default="1")
    ] = None,
    save_every_steps: Annotated[int, typer.Option(help="A run that is killed loses at most so many steps.")] = 100,
    max_failures: Annotated[int, typer.Option(help="Workers that may die before the run gives up.")] = 3,
    held_out: Annotated[float, typer.Option(help="Share of the rollouts that expected tau is measured on.")] = 0.05,
    cache_bytes: Annotated[
        int, typer.Option(help="Of features that a worker keeps in memory from epoch to epoch.", show_default="4 GiB")
    ] = 4 * 2**30,
    seed: Annotated[int, typer.Option(help="Of initial weights, order and anchors.")] = 0,
    num_workers: Annotated[str, typer.Option(help="Ray Train workers: a number, or least:most (elastic).")] = "1",
    cpus_per_worker: Annotated[float, typer.Option(help="CPUs that Ray sets aside for each.")] = 1.0,
    gpu: Annotated[bool, typer.Option("--gpu", help="One GPU per worker.")] = False,
    resource: Annotated[
        list[str] | None, typer.Option(help="NAME=AMOUNT of a custom Ray resource that a worker's node must have.")
    ] = None,
    actor_resource: Annotated[list[str] | None, typer.Option(help="online: the same of a target actor's node.")] = None,
    as_json: JsonOption = False,
) -> None:
    """Train a drafter on rollouts, then decode held-out prompts with it.

    Exit code 1 if the real engine accepts more or fewer drafts than training says it will.
    """
    with one_line_errors():
        from cluster import show
        from drafters.losses import LossConfig
        from pipelines.step_config import StepConfig
        from pipelines.train import train as learn
        from pipelines.train_config import DFlashOptions, IndependentOptions, JointOptions, OnlineOptions, TrainConfig

        least, most = least_most(num_workers)
        of_joint = given(beta=beta, trunk_learning_rate=trunk_learning_rate)
        of_online = given(dtype=dtype, num_actors=num_actors, cpus_per_actor=cpus_per_actor)
        of_online |= given(resources=amounts(actor_resource) or None, target_layer_ids=layer_ids(layers))
        if of_joint and regime != "joint":
            fail(f"{next(iter(of_joint))} belongs to --regime joint; give both, or none", 2)
        if of_online and not online:
            typed = {"resources": "actor_resource", "target_layer_ids": "layers"}  # where a field has another name
            name = next(iter(of_online))
            fail(f"{typed.get(name, name)} belongs to --online; give both, or none", 2)
        if taps is not None and not online and regime != "joint":
            fail("taps belongs to --online or --regime joint: the rollouts say which layers they have", 2)
        online_options = joint_options = None
        if online:
            of_online["num_actors"] = least_most(num_actors or "1")
            online_options = OnlineOptions(gpus_per_actor=1.0 if gpu else 0.0, **of_online, **given(num_taps=taps))
        if regime == "joint":
            joint_options = JointOptions(**of_joint, **given(num_taps=taps))
        config = TrainConfig(
            target=target, rollouts=tuple(rollouts), output=output, kind=kind, num_draft_tokens=num_draft_tokens,
            draft_vocab_coverage=draft_vocab_coverage, draft_vocab_size=draft_vocab_size,
            rollout_weights=tuple(weight or ()), init_from=init_from, online=online_options,
            joint=joint_options,
            save_every_steps=save_every_steps, max_failures=max_failures, held_out=held_out,
            cache_bytes=cache_bytes, cpus_per_worker=cpus_per_worker,
            num_workers=most, min_workers=least if least < most else None, use_gpu=gpu,
            resources=amounts(resource),
            independent=IndependentOptions(
                own_lm_head=own_lm_head, shared_trunk=shared_trunk, anchor_embedding=anchor_embedding,
                medusa_heads=medusa_heads,
            ),
            dflash=DFlashOptions(
                block_size=block_size, num_hidden_layers=num_hidden_layers, selector_top_k=selector_top_k,
                conv_kernel_size=conv_kernel_size, confidence_head=confidence_head, slot_context=slot_context,
                sliding_window=sliding_window, init_from_target_layers=init_from_target_layers,
                mask_token_id=mask_token_id,
            ),
            steps=StepConfig(
                epochs=epochs, learning_rate=learning_rate, tokens_per_step=tokens_per_step,
                micro_batches=micro_batches, row_tokens=row_tokens, shuffle_tokens=shuffle_tokens,
                anchors_per_sequence=anchors_per_sequence, precision=precision, evaluations=evaluations, seed=seed,
                loss=LossConfig(
                    kind=loss, weights=loss_weights, rho=rho, gamma=gamma,
                ),
            ),
        )  # fmt: skip
        what = f"a {show.KINDS[kind]} drafter" if init_from is None else f"{init_from} goes on"
        with show.stage(console, f"train: {what} for {target}", as_json) as stage:
            report = learn(config, stage.train)
        served = f"{report.output}/trunk" if regime == "joint" else target
        end(report, show.train_table, as_json, f"draftloop evaluate --target {served} --drafter {report.output}")
        if report.parity_passed is False:
            fail(f"{report.parity_verdict} (kept in {report.output})", 1)

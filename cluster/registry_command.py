"""`draftloop registry add | list | show | promote | rollback | prune`: the versions of a drafter, and the champion."""

from __future__ import annotations

from typing import Annotated

import typer

from cluster.command import JsonOption, end, fail, one_line_errors

registry = typer.Typer(help="Versions of a drafter: add, look, promote, roll back, remove.", no_args_is_help=True)

RegistryOption = Annotated[
    str, typer.Option("--registry", help="Folder of one target's versions, local or s3://; the first `add` makes it.")
]
WhyOption = Annotated[str, typer.Option("--why", help="The reason; it stands in the history.")]
ByOption = Annotated[
    str | None, typer.Option("--by", help="Who does it, for the history.", show_default="user@machine")
]


@registry.command()
def add(
    checkpoint: Annotated[str, typer.Argument(help="--output of train: a folder or an s3:// address.")],
    uri: RegistryOption,
    name: Annotated[
        str | None, typer.Option(help="Of the version.", show_default="the time and its content's digest")
    ] = None,
    parent: Annotated[str | None, typer.Option(help="The version that it was trained from.")] = None,
    as_json: JsonOption = False,
) -> None:
    """Copy a drafter into the registry as a new version, with the evaluation.json beside it.

    Nothing serves it before it is promoted. The same drafter again is found, not added.
    """
    with one_line_errors():
        from cluster.show_registry import Added, added_table
        from drafters.registry import Registry

        versions = Registry(uri)
        known = {version.name for version in versions.versions()}
        if parent is not None:
            versions.version(parent)
        made = versions.publish(checkpoint, name=name, parent=parent)
        report = Added(registry=versions.uri, version=made.as_json(), uri=made.uri, was_there=made.name in known)
        end(report, added_table, as_json, f"draftloop registry promote {made.name} --registry {uri} --why ...")


@registry.command("list")
def list_versions(uri: RegistryOption, as_json: JsonOption = False) -> None:
    """Every version, who is champion, what replicas serve, and the history."""
    with one_line_errors():
        from cluster.show_registry import listing, listing_view
        from drafters.registry import Registry

        found = listing(Registry(uri))
        if not found.versions:
            following = f"draftloop registry add DRAFTER --registry {uri}"
        else:
            following = f"draftloop registry show {found.versions[-1]['name']} --registry {uri}"
        end(found, listing_view, as_json, following)


@registry.command()
def show(
    version: Annotated[str, typer.Argument(help="Its name, as `list` shows it.")],
    uri: RegistryOption,
    as_json: JsonOption = False,
) -> None:
    """One version: where it comes from, its evaluation, its verdict, and when it was champion."""
    with one_line_errors():
        from cluster.show_registry import shown, shown_table
        from drafters.registry import Registry

        found = shown(Registry(uri), version)
        command = "rollback" if found.role == "champion" else f"promote {version}"
        end(found, shown_table, as_json, f"draftloop registry {command} --registry {uri} --why ...")


@registry.command()
def promote(
    version: Annotated[str, typer.Argument(help="Its name, as `list` shows it.")],
    uri: RegistryOption,
    why: WhyOption,
    by: ByOption = None,
    force: Annotated[bool, typer.Option("--force", help="Also one that was rejected.")] = False,
    as_json: JsonOption = False,
) -> None:
    """Make a version the champion: replicas that follow the registry load it."""
    with one_line_errors():
        from cluster.show_registry import change_table, changed
        from drafters.registry import Registry, who

        versions = Registry(uri)
        verdict = versions.verdict(version)
        if verdict is not None and not force:
            fail(f"version {version} was rejected ({verdict.get('why')}); give --force to promote it all the same", 1)
        expected = versions.champion()
        change = versions.promote(version, by=by or who(), why=why, expected=expected)
        report = changed(versions, change, expected)
        end(report, change_table, as_json, f"draftloop registry list --registry {uri}")


@registry.command()
def rollback(
    uri: RegistryOption,
    why: WhyOption,
    by: ByOption = None,
    to: Annotated[str | None, typer.Option(help="A version.", show_default="the one that was champion before")] = None,
    plain: Annotated[bool, typer.Option("--plain", help="To no drafter: replicas decode plainly.")] = False,
    as_json: JsonOption = False,
) -> None:
    """Make an earlier version the champion again. A second one goes further back, not forth."""
    with one_line_errors():
        from cluster.show_registry import change_table, changed
        from drafters.registry import PLAIN, Registry, who

        if plain and to is not None:
            fail("--plain and --to exclude each other; give one of them", 2)
        versions = Registry(uri)
        expected = versions.champion()
        change = versions.rollback(by=by or who(), why=why, expected=expected, to=PLAIN if plain else to)
        report = changed(versions, change, expected)
        end(report, change_table, as_json, f"draftloop registry list --registry {uri}")


@registry.command()
def prune(
    uri: RegistryOption,
    keep: Annotated[int, typer.Option(min=0, help="Newest versions that stay; rejected ones go first.")],
    why: Annotated[str | None, typer.Option("--why", help="The reason, for the history.")] = None,
    by: ByOption = None,
    as_json: JsonOption = False,
) -> None:
    """Remove old versions.

    Never the champion, the one before it, what a replica serves, or what is just being added.
    """
    with one_line_errors():
        from cluster.show_registry import Pruned, pruned_table
        from drafters.registry import Registry, who

        versions = Registry(uri)
        removed = versions.prune(keep=keep, by=by or who(), why=why)
        left = [version.name for version in versions.versions()]
        report = Pruned(registry=versions.uri, removed=removed, left=left)
        end(report, pruned_table, as_json, f"draftloop registry list --registry {uri}")

# SPDX-License-Identifier: Apache-2.0
"""The command line of hack/atp-cluster."""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Sequence
from pathlib import Path

from . import binaries, cluster, elevate, images, prereqs, processes, runtime, versions
from .errors import ClusterError
from .paths import Paths, current

PASSED_ON = ("kubectl", "helm", "ctr")


def parser() -> argparse.ArgumentParser:
    top = argparse.ArgumentParser(prog="atp-cluster", description="A one-node Kubernetes cluster on this machine.")
    commands = top.add_subparsers(dest="command", required=True, metavar="COMMAND")
    command = commands.add_parser("prereqs", help="name everything that is missing on this machine")
    command.add_argument("--install", action="store_true", help="install the missing Debian packages")
    command.add_argument("--tests", action="store_true", help="also what only the tests need")
    commands.add_parser("build", help="build the cluster's binaries (about ten minutes, once)")
    commands.add_parser("up", help="start or repair the cluster and wait until it works")
    command = commands.add_parser("down", help="stop the cluster and put the host back as it was")
    command.add_argument("--purge", action="store_true", help="remove its state too (images, objects, logs)")
    commands.add_parser("status", help="what runs; exit code 1 if something does not")
    commands.add_parser("kubeconfig", help="print the path of the admin's kubeconfig")
    command = commands.add_parser("which", help="print the path of a binary (kubectl, helm, etcdctl ...)")
    command.add_argument("name", choices=[binary.name for binary in versions.BINARIES])
    commands.add_parser("bin", help="print the folder of the binaries (kubectl, helm, etcdctl ...)")
    command = commands.add_parser("logs", help="print the log of a process")
    command.add_argument("name", choices=cluster.ALL)
    command.add_argument("-f", "--follow", action="store_true")
    for name in PASSED_ON:
        commands.add_parser(name, help=f"run {name} on this cluster", add_help=False)
    _image_parser(commands.add_parser("image", help="build, load and save container images"))
    return top


def _image_parser(image: argparse.ArgumentParser) -> None:
    actions = image.add_subparsers(dest="action", required=True, metavar="ACTION")
    for name, text in (
        ("build", "build an image unless it exists, and print its reference"),
        ("load", "build it if needed, import it into the cluster, and print its reference"),
        ("save", "build it if needed and write it to a file (docker archive)"),
        ("push", "build it if needed and push it to a registry"),
    ):
        action = actions.add_parser(name, help=text)
        action.add_argument("name", help="base, torch, a name of your own with --file, or a reference")
        if name == "save":
            action.add_argument("archive", type=Path)
        if name == "push":
            action.add_argument("registry", help="registry and path, as registry.example.com/team")
        action.add_argument("--file", type=Path, help="the Containerfile (default hack/images/NAME.Containerfile)")
        action.add_argument("--context", type=Path, help="folder with the files it copies (default: none)")
        action.add_argument("--build-arg", action="append", default=[], metavar="KEY=VALUE")
        action.add_argument("--include", action="append", metavar="PATH", help="take only this part of the context")
    actions.add_parser("list", help="list the images built here")
    actions.add_parser("prune", help="remove built images except the newest of each name")
    actions.add_parser("purge", help="remove all built images and their storage")


def main(argv: Sequence[str] | None = None) -> int:
    words = list(sys.argv[1:] if argv is None else argv)
    paths = current()
    try:
        if words and words[0] in PASSED_ON:  # argparse would swallow their "--"
            return _pass_on(words[0], words[1:], paths)
        return _run(parser().parse_args(words), paths)
    except ClusterError as error:
        print(f"atp-cluster: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        return 130


def _run(args: argparse.Namespace, paths: Paths) -> int:
    match args.command:
        case "prereqs":
            packages = (*prereqs.APT, *prereqs.APT_TESTS) if args.tests else prereqs.APT
            missing = prereqs.find_missing(packages)
            if args.install:
                missing = prereqs.install(missing, packages)
            print(prereqs.report(missing, root=os.getuid() == 0))
            return 1 if missing else 0
        case "build":
            print(binaries.build(paths))
        case "up":
            cluster.up(paths)
        case "down":
            cluster.down(paths, purge=args.purge)
        case "status":
            text, well = cluster.status(paths)
            print(text)
            return 0 if well else 1
        case "kubeconfig":
            print(paths.kubeconfig)
        case "which":
            print(cluster.tool(paths, args.name))
        case "bin":
            print(versions.bin_dir(paths))
        case "logs":
            follow = ["-F"] if args.follow else []
            _exec(
                [
                    "tail",
                    "-n",
                    "200" if args.follow else "+1",
                    *follow,
                    str(processes.log_path(paths, args.name)),
                ]
            )
        case "image":
            _image(args, paths)
    return 0


def _pass_on(name: str, words: list[str], paths: Paths) -> int:
    if name == "ctr":
        _exec(runtime.ctr_argv(paths, *words))
    os.environ["KUBECONFIG"] = str(paths.kubeconfig)
    _exec([str(cluster.tool(paths, name)), *words])
    return 0


def _image(args: argparse.Namespace, paths: Paths) -> None:
    if elevate.needed():
        print(elevate.run(sys.argv[1:], paths), end="")
        return
    if args.action == "list":
        print(images.listing(paths))
        return
    if args.action == "prune":
        images.prune(paths)
        return
    if args.action == "purge":
        images.purge(paths)
        return
    build_args = dict(item.partition("=")[::2] for item in args.build_arg)
    if args.name.startswith(f"{images.PREFIX}/"):  # built already, and named by its full reference
        reference = args.name
        if not images.exists(reference, paths=paths):
            raise ClusterError(f"there is no image {reference}; `hack/atp-cluster image list` shows what is there")
    else:
        reference = images.ensure(args.name, args.file, args.context, build_args, include=args.include, paths=paths)
    if args.action == "load":
        images.load(reference, paths=paths)
    elif args.action == "save":
        images.save(reference, args.archive, paths=paths)
    elif args.action == "push":
        reference = images.push(reference, args.registry, paths=paths)
    print(reference)


def _exec(argv: list[str]) -> None:
    sys.stdout.flush()
    try:
        os.execvp(argv[0], argv)
    except FileNotFoundError:
        raise ClusterError(f"{argv[0]} does not exist; run `hack/atp-cluster prereqs`") from None

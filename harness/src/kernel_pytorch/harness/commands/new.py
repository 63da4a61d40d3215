"""`kernel-pytorch new`: a package, made from the template of a checkout.

The template, `template/`, is a small image of the checkout: a package that works as is. A new package is a copy of it
with two words replaced, its name in contents and paths and that of its parameter, and a link to `core/`, which every
package has. Only the standard library is imported, so that a clean clone makes a package before anything is installed:

    python -I harness/src/kernel_pytorch/harness/commands/new.py my-technique --parameter beta
"""

from __future__ import annotations

import io
import keyword
import re
import sys
import tokenize
from collections.abc import Sequence
from pathlib import Path

TEMPLATE = "template"
LINK = Path("packages", "my-technique", "src", "kernel_pytorch", "my_technique", "_core")
CORE = Path("..", "..", "..", "..", "..", "core")
"""What packages share: a link, and where it leads."""
PLACEHOLDER = "my-technique"
PARAMETER, OPTION = "beta", "--parameter"
KEBAB_CASE = re.compile(r"[a-z][a-z0-9]*(-[a-z0-9]+)*")
LENGTHS = range(2, 29)
"""Letters of a name: more would make the template's lines too long, and fewer would not describe the package."""
PARAMETERS = re.compile("[a-z][a-z0-9_]{0,11}")
OURS = ("harness",)
"""What is imported beside the packages."""


class NewError(ValueError):
    """A package that cannot be made; the message says what was given, what is allowed and what to do."""


def new_command(name: str, parameter: str = PARAMETER) -> None:
    """Make packages/NAME from the template of this checkout; nothing else changes.

    Exit code: 0; 2 for a name that cannot be taken, with the reason.
    """
    main([name, OPTION, parameter])


def main(arguments: Sequence[str]) -> None:
    """Make the package that `arguments` name, and print what was made and what to do next."""
    names, parameter = [*arguments], PARAMETER
    if OPTION in names:
        place = names.index(OPTION)
        _, parameter, *_ = [*names[place : place + 2], ""]
        del names[place : place + 2]
    try:
        if len(names) != 1:
            given = f"given {len(names)} names" if names else "no name"
            raise NewError(f"{given}; give one, in kebab-case: `.venv/bin/nox -s new -- {PLACEHOLDER}`")
        made = make(name := names[0], checkout(Path.cwd()), parameter)
    except NewError as error:
        sys.stderr.write(f"kernel-pytorch: {error}\n")
        sys.exit(2)
    package = Path("packages", name)
    sys.stdout.write(
        f"{package}: {len(made) - 1} files and a link to core/, a technique that works as it stands\n"
        "Next:\n"
        f"  .venv/bin/nox -s tests -- {package}/tests\n"
        f"  .venv/bin/nox -s bench -- {name} --full\n"
        "  .venv/bin/nox -s lint static docs\n"
    )


def checkout(start: Path) -> Path:
    """The folder at or above `start` that holds the template. Raises NewError if there is none."""
    for folder in (start, *start.parents):
        if (folder / TEMPLATE / "packages" / PLACEHOLDER / "pyproject.toml").is_file():
            return folder
    raise NewError(f"no {TEMPLATE}/ in {start} or above; run it inside a clone of the repository")


def make(name: str, root: Path, parameter: str = PARAMETER) -> list[Path]:
    """Write the package, with its link to what all packages share.

    Args:
        name: in kebab-case.
        root: of the checkout.
        parameter: the name of the function's number.

    Returns:
        What was made, relative to `root`: the files, and the link.

    Raises:
        NewError: the name cannot be taken; nothing was written.
    """
    check_name(name, root)
    check_parameter(parameter, name, root)
    rendered = {render_path(path, name): render(text, name, parameter) for path, text in template(root).items()}
    for path, text in rendered.items():
        (root / path).parent.mkdir(parents=True, exist_ok=True)
        (root / path).write_text(text, encoding="utf-8")
    link = render_path(LINK, name)
    (root / link).symlink_to(CORE, target_is_directory=True)
    return [*rendered, link]


def check_name(name: str, root: Path) -> None:
    """Raise NewError, with the reason, unless a package of that name can be made in this checkout."""
    if not KEBAB_CASE.fullmatch(name):
        raise NewError(
            f"name {name!r} is not kebab-case: small letters and digits, a letter first, words joined by single "
            f"hyphens, as in {PLACEHOLDER!r}"
        )
    if len(name) not in LENGTHS:
        raise NewError(f"name {name!r} has {len(name)} letters; allowed are {LENGTHS[0]} to {LENGTHS[-1]}")
    word = words(name)["my_technique"]
    if keyword.iskeyword(word) or keyword.issoftkeyword(word):
        raise NewError(f"name {name!r} is a keyword of Python, so nothing can be called so; choose another")
    if word in OURS:
        raise NewError(f"name {name!r} is taken: kernel_pytorch.{word} is the harness; choose another")
    taken = [Path("packages", name), Path("docs", "techniques", f"{name}.md")]
    found = [str(path) for path in taken if (root / path).exists()]
    found += [str(path.relative_to(root)) for path in root.glob(f"packages/*/src/kernel_pytorch/{word}")]
    if found:
        raise NewError(f"name {name!r} is taken: there is {found[0]}; choose another, or remove that first")
    for hidden in identifiers(root) & {word, words(name)["MyTechnique"]}:
        raise NewError(f"name {name!r} would hide what the template's own code calls {hidden!r}; choose another")


def check_parameter(parameter: str, name: str, root: Path) -> None:
    """Raise NewError, with the reason, unless the parameter of the package of that name can be called so."""
    if not PARAMETERS.fullmatch(parameter) or keyword.iskeyword(parameter):
        raise NewError(
            f"parameter {parameter!r} is not allowed: up to 12 small letters, digits and underscores, a letter first, "
            "and no keyword of Python"
        )
    if parameter != PARAMETER and parameter in identifiers(root) | {*words(name).values()}:
        raise NewError(f"parameter {parameter!r} is a name in the package's own code; choose another")


def template(root: Path) -> dict[Path, str]:
    """The files of a package that are rendered, by path relative to the template, and the license of the checkout."""
    folder, left = root / TEMPLATE, re.compile(r"/(__pycache__|\.[^/]*|[^/]*\.egg-info)/")  # by tools
    files = {file.relative_to(folder): file for file in sorted((folder / "packages").rglob("*")) if file.is_file()}
    files[Path("packages", PLACEHOLDER, "LICENSE")] = root / "LICENSE"
    return {path: file.read_text(encoding="utf-8") for path, file in files.items() if not left.search(f"/{path}")}


def identifiers(root: Path) -> set[str]:
    """Every name in the code of the template, and the names of its modules, but for what is replaced."""
    found: set[str] = set()
    for path, text in template(root).items():
        if path.suffix == ".py":
            tokens = tokenize.generate_tokens(io.StringIO(text).readline)
            found |= {path.stem} | {token.string for token in tokens if token.type == tokenize.NAME}
    return found - set(words(PLACEHOLDER).values())


def words(name: str) -> dict[str, str]:
    """What stands in the template, and what takes its place in the package of that name."""
    parts = name.split("-")
    return {
        PLACEHOLDER: name,
        "my_technique": "_".join(parts),
        "MyTechnique": "".join(part.capitalize() for part in parts),
        "My technique": " ".join(parts).capitalize(),
    }


def render(text: str, name: str, parameter: str = PARAMETER) -> str:
    """Render a text of the template for the package of that name: replace words, and sort imports again."""
    replaced = words(name)

    def in_order(lines: re.Match[str]) -> str:
        return "".join(sorted(lines[0].splitlines(keepends=True), key=lambda line: line.split()[1]))

    text = re.sub(rf"(?<!\\)\b{PARAMETER}\b", parameter, text)  # a formula has the letter, \beta
    text = re.sub("|".join(replaced), lambda found: replaced[found[0]], text)
    # One of these imports the package, and the name decides its place among them.
    return re.sub(r"(?:^from kernel_pytorch\.[^\n(]+\n){2,}", in_order, text, flags=re.MULTILINE)


def render_path(path: Path, name: str) -> Path:
    """Replace the words of a path as `render` does."""
    return Path(render(str(path), name))


if __name__ == "__main__":
    main(sys.argv[1:])

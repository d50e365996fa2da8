#!/usr/bin/env python3
"""Drops every condition of every filter in `common::store`, one by one, and reports which tests notice.

An operation on MongoDB repeats in its filter what its caller's decision relied on. A condition that can be dropped
without a test failing is either not needed or not tested.

How: the workspace is copied, and in the copy every filter is wrapped, so that an environment variable takes one of its
conditions out. That is built once; then the tests run once with all conditions and once without each of them.

What is a filter is found, not listed: whatever goes into a method of a collection or is the `q` of an update command is
followed back through variables, arguments and functions to the `doc! { … }` that make it. A condition is each of its keys
(but not a bare `_id`, which is who is meant), each member of `$and` and `$expr`, and each alternative of `$or`. What cannot
be followed ends the script with the place where it got lost.
"""

import argparse
import fnmatch
import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass, field
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
STORE = Path("common/src/store")
VARIABLE = "RECRUITER_DROPPED_CONDITION"

# Tests that are to notice: the second only if the first do not.
TESTS = [("guards", []), ("it", ["store::"])]
# Longer than they ever take: whoever is not ready by then has not said anything.
TESTS_MAY_TAKE = 600

# Conditions that no write relies on and no test needs to notice, each with the reason.
NO_GUARDS: dict[str, str] = {}
# Functions that make a filter without writing it out, each with the reason why its conditions need not be found.
OPAQUE = {"fields": "what a person asks to see in a list (tests/tests/it/cli.rs)"}

ASKS = "update_one update_many delete_one delete_many find find_one find_one_and_update count_documents".split()
# Ways to ask that nobody uses: whoever is the first has to say here where the filter is.
UNKNOWN_ASKS = "aggregate bulk_write distinct find_one_and_delete find_one_and_replace replace_one watch".split()
UNKNOWN_KEYS = "deletes filter findAndModify pipeline query".split()
# What may be done with a variable that is part of a filter without changing it.
HARMLESS = "clone is_empty iter into_iter len map then".split()
BARE_ID = re.compile(r'[\w.]+|"\w+"')

# Appended to the store's module in the copy.
SWITCH = """
fn keeps(condition: &str) -> bool {
    std::env::var("%s").as_deref() != Ok(condition)
}

fn without(filter: bson::Document, conditions: &[(&str, &[&str])]) -> bson::Document {
    let mut filter = bson::Bson::Document(filter);
    for (_, path) in conditions.iter().filter(|(condition, _)| !keeps(condition)) {
        drop_at(&mut filter, path);
    }
    let bson::Bson::Document(filter) = filter else { unreachable!() };
    filter
}

fn drop_at(value: &mut bson::Bson, path: &[&str]) {
    match (value, path) {
        (bson::Bson::Document(of), [last]) => drop(of.remove(last).expect("the condition is there")),
        (bson::Bson::Document(of), [next, rest @ ..]) => drop_at(of.get_mut(next).expect("the way is there"), rest),
        (bson::Bson::Array(of), [last]) => drop(of.remove(last.parse::<usize>().expect("an index"))),
        (bson::Bson::Array(of), [next, rest @ ..]) => drop_at(&mut of[next.parse::<usize>().expect("an index")], rest),
        _ => panic!("no way to the condition"),
    }
}
""" % VARIABLE


class NotUnderstood(Exception):
    """Something in the store is written in a way that this script does not know."""


# --- Rust, as far as it is needed ---


def masked(text):
    """The same text with comments and what is inside of strings blanked: brackets and words are code, offsets stay."""
    token = r"//[^\n]*|/\*.*?\*/|r#*\"(?:.*?)\"#*|\"(?:\\.|[^\"\\])*\"|'(?:\\.[^']*|[^'\\])'"

    def blank(found):
        inner = re.sub(r"[^\n]", " ", found[0])
        return '"' + inner[1:-1] + '"' if found[0].endswith('"') else inner

    return re.sub(token, blank, text, flags=re.DOTALL)


def closing(code, opening):
    """Where the bracket that opens there is closed."""
    depth = 0
    for at in range(opening, len(code)):
        depth += (code[at] in "([{") - (code[at] in ")]}")
        if depth == 0:
            return at
    raise NotUnderstood("a bracket is not closed")


def trimmed(code, start, end):
    """The span without spaces around it."""
    while start < end and code[start].isspace():
        start += 1
    while start < end and code[end - 1].isspace():
        end -= 1
    return start, end


def split(code, start, end, separator=",", angles=False):
    """The spans between separators outside of all brackets; in types the angle brackets are some, too."""
    depth, begin, spans = 0, start, []
    for at in range(start, end):
        depth += (code[at] in "([{") - (code[at] in ")]}")
        if angles and code[at - 1] != "-":
            depth += (code[at] == "<") - (code[at] == ">")
        if code[at] == separator and depth == 0:
            spans.append((begin, at))
            begin = at + 1
    spans.append((begin, end))
    return [span for span in (trimmed(code, *span) for span in spans) if span[0] < span[1]]


@dataclass(eq=False)
class Function:
    source: "Source"
    name: str
    parameters: list  # of (name, type), `self` left out
    method: bool
    returns: str
    asynchronous: bool
    body: tuple


class Source:
    """One file of the store, without its unit tests."""

    def __init__(self, path):
        self.path, self.text = path, (ROOT / path).read_text()
        self.code = masked(self.text)
        tests = re.search(r"#\[cfg\(test\)\]\s*mod ", self.code)
        self.code = self.code[: tests.start()] if tests else self.code
        self.functions = [made for made in map(self.function, re.finditer(r"\bfn (\w+)", self.code)) if made]

    def function(self, head):
        opening = head.end()
        if self.code[opening] == "<":
            (generics, end), *_ = split(self.code, opening, len(self.code), "(", angles=True)
            opening = end
        end = closing(self.code, opening)
        brace, semicolon = self.code.find("{", end), self.code.find(";", end)
        if brace < 0 or 0 <= semicolon < brace:
            return None
        parameters = [self.text[slice(*span)] for span in split(self.code, opening + 1, end, angles=True)]
        method = bool(parameters) and re.fullmatch(r"(&\s*)?(mut )?self", parameters[0]) is not None
        named = [tuple(part.strip() for part in one.removeprefix("mut ").split(":", 1)) for one in parameters[method:]]
        asynchronous = self.code[: head.start()].rstrip().endswith("async")
        return Function(self, head[1], named, method, self.code[end + 1 : brace], asynchronous, (brace + 1, closing(self.code, brace)))

    def around(self, at):
        """The innermost function around a place."""
        around = [one for one in self.functions if one.body[0] <= at < one.body[1]]
        return max(around, key=lambda one: one.body[0], default=None)

    def line(self, at):
        return self.text.count("\n", 0, at) + 1

    def lost(self, at, why):
        excerpt = " ".join(self.text[at : at + 80].split())
        return NotUnderstood(f"{self.path}:{self.line(at)}: {why}: {excerpt}")


# --- filters and their conditions ---


@dataclass
class Condition:
    function: str
    key: str
    value: str
    source: Source
    at: int
    name: str = ""
    path: list = field(default_factory=list)  # inside of the literal; nothing for a statement of its own
    statement: tuple = ()
    literal: int = -1


class Filters:
    """Everything in the store that says which documents are meant, as literals, and their conditions."""

    def __init__(self):
        self.sources = [Source(path.relative_to(ROOT)) for path in sorted((ROOT / STORE).glob("*.rs"))]
        self.conditions, self.seen = [], set()
        for source in self.sources:
            for span in self.asked(source):
                self.follow(source, *span, "this filter")
        self.name()

    def asked(self, source):
        """The spans of expressions that are filters."""
        for found in re.finditer(r"\.(\w+)\(", source.code):
            if found[1] in UNKNOWN_ASKS:
                raise source.lost(found.start(), "a way to ask that this script does not know")
            first = split(source.code, found.end(), closing(source.code, found.end() - 1))[:1]
            # An iterator has a `find` as well.
            if found[1] in ASKS and first and source.code[first[0][0]] != "|":
                yield first[0]
        for found in re.finditer(r'"[^"]*"(?=\s*:[^:])', source.code):
            key = source.text[found.start() + 1 : found.end() - 1]
            if key in UNKNOWN_KEYS:
                raise source.lost(found.start(), "a command that this script does not know")
            if key == "q":
                yield self.value(source, found.end())

    def value(self, source, at):
        """The span of the value whose colon comes next."""
        start = source.code.index(":", at) + 1
        end = min((start + len(source.code[start:]), *(at for at in self.ends(source, start))))
        return trimmed(source.code, start, end)

    @staticmethod
    def ends(source, start):
        depth = 0
        for at in range(start, len(source.code)):
            depth += (source.code[at] in "([{") - (source.code[at] in ")]}")
            if depth < 0 or depth == 0 and source.code[at] == ",":
                return [at]
        return []

    def follow(self, source, start, end, what):
        """Follows an expression that is (part of) a filter to its literals; there must be some."""
        if not self.trace(source, start, end):
            raise source.lost(start, f"it is not understood what makes {what}")

    def trace(self, source, start, end):
        """Finds what an expression is made of; says whether there was anything."""
        if (source, start, end) in self.seen:
            return True
        self.seen.add((source, start, end))
        found, rest = False, source.code[start:end]
        if rest.startswith("{"):
            rest = "doc!" + rest
            self.literal(source, start)
            return True
        for made in list(re.finditer(r"\bdoc! (\{)", rest)):
            if rest[made.start()] == "d":
                last = closing(rest, made.start(1))
                rest = rest[: made.start()] + " " * (last + 1 - made.start()) + rest[last + 1 :]
                self.literal(source, start + made.start(1))
                found = True
        # What is asked in an `if` or a `match` does not make it.
        rest = re.sub(r"\b(if|match)\b[^{]*", lambda asked: " " * len(asked[0]), rest)
        for word in re.finditer(r"(\.?)\b([a-z_]\w*)\b(\(?)(?!!|::)", rest):
            dot, name, call = word.groups()
            at = start + word.start(2)
            if call:
                found |= self.call(source, at, name, bool(dot))
            elif not dot:
                found |= self.variable(source, at, name)
        if not found:
            self.seen.discard((source, start, end))
        return found

    def call(self, source, at, name, method):
        """What a function of the store makes, if it makes a document."""
        made = [
            (of, one)
            for of in self.sources
            for one in of.functions
            if one.name == name and one.method == method and not one.asynchronous and re.search(r"\bDocument\b", one.returns)
        ]
        if not made or source.code[source.code.index("(", at) + 1] == "|":
            return False
        if name in OPAQUE:
            return True
        for of, one in made:
            statements = split(of.code, *one.body, separator=";")
            # The last statement, after the blocks before it.
            start, end = statements[-1]
            for block in re.finditer(r"\}\n {4}(?=[\w(&])", of.code[start:end]):
                start = start + block.end() if closing_depth(of.code[start : start + block.end()]) == 0 else start
            self.follow(of, start, end, f"what `{name}` returns")
        return True

    def variable(self, source, at, name):
        """What a variable or an argument holds, if it is (part of) a filter."""
        function = source.around(at)
        begin = function.body[0]
        for index, (parameter, kind) in enumerate(function.parameters):
            if parameter == name and re.search(r"\bDocument\b", kind):
                return self.arguments(function, index)
        declared = None
        for declared in re.finditer(rf"\blet\s+(?:mut\s+)?(?:{name}\b(?:\s*:[^=;]*)?|\([^()]*\b{name}\b[^()]*\))\s*=(?!=)", source.code[begin:at]):
            pass
        if not declared:
            return False
        start = begin + declared.end()
        (start, end), *_ = split(source.code, start, function.body[1], ";")
        names = re.search(r"\(([^()]*)\)\s*=$", declared[0])
        if names and source.code[start] == "(" and closing(source.code, start) == end - 1:
            index = [one.strip().removeprefix("mut ") for one in names[1].split(",")].index(name)
            start, end = split(source.code, start + 1, end - 1)[index]
        if start <= at < end:
            return False
        found = self.trace(source, start, end)
        return self.changed(source, function, end, name, found) or found

    def changed(self, source, function, after, name, is_filter):
        """What is added to a variable later."""
        found, changes = False, []
        for use in re.finditer(rf"(?<![\w.]){name}\.(\w+)(\()?", source.code[after : function.body[1]]):
            opening = after + use.end() - 1
            span = (opening + 1, closing(source.code, opening)) if use[2] else ()
            if use[1] in ("push", "extend"):
                found |= self.trace(source, *span)
            else:
                changes.append((after + use.start(), use[1], span))
        for at, change, span in changes if is_filter or found else []:
            if change == "insert":
                self.insertion(source, function, at, span)
            elif change not in HARMLESS:
                raise source.lost(at, f"it is not understood what becomes of `{name}`")
        return found

    def insertion(self, source, function, at, span):
        key, value = split(source.code, *span)
        if not re.fullmatch(r'"[^"]*"', source.text[slice(*key)]) or source.code[span[1] + 1] != ";":
            raise source.lost(at, "it is not understood what is inserted")
        if (source, at) not in self.seen:
            self.seen.add((source, at))
            made = Condition(function.name, source.text[key[0] + 1 : key[1] - 1], source.text[slice(*value)], source, at)
            made.statement = (at, span[1] + 1)
            self.conditions.append(made)

    def arguments(self, function, index):
        """What the callers of a function pass."""
        dot = r"\." if function.method else r"(?<![\w.])"
        called = False
        for source in self.sources:
            for call in re.finditer(rf"{dot}{function.name}\(", source.code):
                arguments = split(source.code, call.end(), closing(source.code, call.end() - 1))
                if source.code[: call.start()].endswith("fn "):
                    continue
                called = True
                self.follow(source, *arguments[index], f"what is passed to `{function.name}`")
        return called

    def literal(self, source, brace):
        if (source, brace) in self.seen:
            return
        self.seen.add((source, brace))
        self.keys(source, brace, brace, [])

    def keys(self, source, literal, brace, path):
        """The conditions of a document, as members of all that must hold."""
        for key, value in self.entries(source, brace):
            match key:
                case "_id" if BARE_ID.fullmatch(source.text[slice(*value)]):
                    pass
                case "$expr" if source.code[value[0]] == "{" and self.logical(source, value[0]):
                    self.keys(source, literal, value[0], [*path, key])
                case "$and":
                    self.members(source, literal, value, [*path, key])
                case "$or":
                    self.add(source, literal, key, (value[0], value[0]), [*path, key])
                    self.members(source, literal, value, [*path, key])
                case "$nor":
                    raise source.lost(value[0], "a condition that this script does not know")
                case _:
                    self.add(source, literal, key, value, [*path, key])

    def members(self, source, literal, value, path):
        """The members of a list of conditions."""
        if source.code[value[0]] != "[":
            return self.follow(source, *value, f"the members of `{path[-1]}`")
        for index, (start, _) in enumerate(split(source.code, value[0] + 1, value[1] - 1)):
            entries = self.entries(source, start)
            if len(entries) > 1 or self.logical(source, start):
                self.keys(source, literal, start, [*path, str(index)])
            else:
                self.add(source, literal, *entries[0], [*path, str(index)])

    def logical(self, source, brace):
        return any(key in ("$and", "$or", "$expr") for key, _ in self.entries(source, brace))

    def entries(self, source, brace):
        """Keys and the spans of their values."""
        if source.code[brace] != "{":
            raise source.lost(brace, "a document was expected")
        entries = []
        for start, end in split(source.code, brace + 1, closing(source.code, brace)):
            colon = split(source.code, start, end, ":")[0][1]
            colon = source.code.index(":", colon)
            key = re.search(r'"([^"]*)"', source.text[start:colon])
            if not key:
                raise source.lost(start, "a key was expected")
            entries.append((key[1], trimmed(source.code, colon + 1, end)))
        return entries

    def add(self, source, literal, key, value, path):
        made = Condition(source.around(literal).name, key, source.text[slice(*value)], source, value[0])
        made.path, made.literal = path, literal
        self.conditions.append(made)

    def name(self):
        """Names each condition after its function and key, and its value where that does not tell it from others."""
        self.conditions.sort(key=lambda one: (one.source.path, one.at))
        keys = [(one.function, one.key) for one in self.conditions]
        for one in self.conditions:
            value = " ".join(re.sub(r'["\[\]{},]', " ", one.value).split())
            operator = one.key.startswith("$") and one.key != "$or"
            told = keys.count((one.function, one.key)) == 1
            one.name = f"{one.function}/{one.key}" + (f" {value}" if operator else "" if told else f"={value}")
        names = [one.name for one in self.conditions]
        for one in self.conditions:
            if names.count(one.name) > 1:
                raise one.source.lost(one.at, f"two conditions go by the name {one.name}")


def closing_depth(code):
    return sum((letter in "([{") - (letter in ")]}") for letter in code)


# --- the copy ---


def switched(source, conditions):
    """The text of a file with every condition behind the switch."""
    inserted = []
    literals = {}
    for one in conditions:
        name = json.dumps(one.name)
        if one.statement:
            inserted += [(one.statement[0], f"if crate::store::keeps({name}) {{ "), (one.statement[1] + 1, " }")]
        else:
            path = ", ".join(map(json.dumps, one.path))
            literals.setdefault(one.literal, []).append(f"({name}, &[{path}][..])")
    for brace, droppable in literals.items():
        macro = source.text[:brace].endswith("doc! ")
        start = brace - len("doc! ") if macro else brace
        inserted += [
            (start, "crate::store::without(" + ("" if macro else "bson::doc! ")),
            (closing(source.code, brace) + 1, f", &[{', '.join(droppable)}])"),
        ]
    text = source.text
    for at, more in sorted(inserted, key=lambda one: one[0], reverse=True):
        text = text[:at] + more + text[at:]
    return text


def copy(filters, to):
    """Makes the copy what the workspace is now, with switches; what has not changed is not touched."""
    wanted = {}
    for directory, names, files in os.walk(ROOT):
        names[:] = [name for name in names if name not in (".git", "target")]
        for file in files:
            path = Path(directory, file)
            wanted[path.relative_to(ROOT)] = path.read_bytes()
    for source in filters.sources:
        text = switched(source, [one for one in filters.conditions if one.source is source])
        wanted[source.path] = text.encode()
    wanted[STORE / "mod.rs"] += SWITCH.encode()
    for path in [path for path in to.rglob("*") if path.is_file()]:
        if path.relative_to(to) not in wanted:
            path.unlink()
    for path, content in wanted.items():
        path = to / path
        if not path.exists() or path.read_bytes() != content:
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(content)


def build(workspace, target):
    """Builds the tests of the copy; returns their programs by name."""
    command = ["cargo", "test", "--no-run", "--message-format=json-render-diagnostics", "-p", "recruiter-tests"]
    command += [word for name, _ in TESTS for word in ("--test", name)]
    environment = {**os.environ, "CARGO_TARGET_DIR": str(target)}
    built = subprocess.run(command, cwd=workspace, env=environment, stdout=subprocess.PIPE, text=True, check=False)
    if built.returncode != 0:
        sys.exit("the copy does not compile: the switch is at fault if the workspace does")
    messages = map(json.loads, built.stdout.splitlines())
    return {said["target"]["name"]: said["executable"] for said in messages if said.get("executable")}


def failures(program, tests, workspace, dropped):
    """The tests that fail when this condition is dropped."""
    environment = {**os.environ, VARIABLE: dropped}
    command = [program, *tests]
    ran = subprocess.run(
        command, cwd=workspace / "tests", env=environment, capture_output=True, text=True, timeout=TESTS_MAY_TAKE, check=False
    )
    verdicts = re.findall(r"^test (\S+).* \.\.\. (ok|FAILED)$", ran.stdout, re.MULTILINE)
    failed = sorted(name for name, verdict in verdicts if verdict == "FAILED")
    if not verdicts or ran.returncode != (101 if failed else 0):
        sys.exit(f"{' '.join(command)} ended with {ran.returncode} without saying why:\n{ran.stdout}\n{ran.stderr}")
    return failed


def killers(programs, workspace, dropped):
    for name, tests in TESTS:
        if failed := failures(programs[name], tests, workspace, dropped):
            return failed
    return []


# --- the report ---


def say(line, end="\n"):
    print(line, end=end, file=sys.stderr, flush=True)


def arguments():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--list", action="store_true", help="only say which conditions there are, and where")
    parser.add_argument("--only", action="append", metavar="NAME", help="only these; `*` stands for anything; can be repeated")
    parser.add_argument("--json", action="store_true", help="the report as JSON")
    parser.add_argument(
        "--directory",
        type=Path,
        default=Path(tempfile.gettempdir(), "recruiter-guards"),
        help="where the copy is built; kept, so that the next time takes shorter (default: %(default)s)",
    )
    return parser.parse_args()


def main():
    asked = arguments()
    try:
        filters = Filters()
    except NotUnderstood as lost:
        sys.exit(f"{lost}\nteach tests/guards.py what that is")
    names = [one.name for one in filters.conditions]
    if stale := [name for name in NO_GUARDS if name not in names]:
        sys.exit(f"there is no condition {', '.join(stale)} any more: take it off the list of those that are no guards")
    wanted = [one for one in filters.conditions if not asked.only or any(fnmatch.fnmatchcase(one.name, only) for only in asked.only)]
    if not wanted:
        sys.exit("no condition goes by that name (see --list)")
    if asked.list:
        for one in wanted:
            print(f"{one.source.path}:{one.source.line(one.at)}: {one.name}")
        return
    os.nice(10)
    started = time.monotonic()
    workspace = asked.directory / "workspace"
    workspace.mkdir(parents=True, exist_ok=True)
    copy(filters, workspace)
    say(f"{len(names)} conditions; building in {asked.directory}")
    programs = build(workspace, asked.directory / "target")
    say(f"built after {time.monotonic() - started:.0f} s; the tests with all conditions")
    for name, tests in TESTS:
        if failed := failures(programs[name], tests, workspace, ""):
            sys.exit(f"these fail with all conditions in place: {', '.join(failed)}")
    report = []
    for number, one in enumerate(wanted, 1):
        say(f"[{number}/{len(wanted)}] {one.name}", end="")
        line = {"condition": one.name, "file": str(one.source.path), "line": one.source.line(one.at)}
        if one.name in NO_GUARDS:
            line["no_guard"] = NO_GUARDS[one.name]
        else:
            begun = time.monotonic()
            line["killers"] = killers(programs, workspace, one.name)
            line["seconds"] = round(time.monotonic() - begun, 1)
        report.append(line)
        say(f": {line.get('no_guard') or ', '.join(line['killers']) or 'SURVIVED'}")
    survivors = [line["condition"] for line in report if not line.get("no_guard") and not line["killers"]]
    if asked.json:
        print(json.dumps({"conditions": report, "survivors": survivors}, indent=2))
    else:
        width = max(len(line["condition"]) for line in report)
        for line in report:
            noticed = line.get("no_guard") or ", ".join(line["killers"]) or "SURVIVED"
            print(f"{line['condition']:<{width}}  {noticed}")
    say(f"{len(report)} conditions, {len(survivors)} survived; {time.monotonic() - started:.0f} s")
    sys.exit(1 if survivors else 0)


if __name__ == "__main__":
    main()

#!/usr/bin/env python3
"""Drops every condition of every filter in `recruiter-common`, one by one, and reports which tests notice.

An operation on MongoDB repeats in its filter what its caller's decision relied on. A condition that can be dropped
without a test failing is either not needed or not tested.

How: the workspace is copied, and in the copy every filter is wrapped so that an environment variable takes one condition
out of it. That is built once (a build for each condition would take several times as long); then the tests run with all
conditions, and once without each of them.

What is a filter is found, not listed: all that is passed to a method of a collection or is the `q` of an update command
is followed back through variables, arguments and functions to the `doc! { … }` that make it. A condition is each key of
these (but not a bare `_id`, which says who is meant), each member of `$and` and `$expr`, and each alternative of `$or`.
What cannot be followed ends the script with the place where it got lost.

Ends with 0 when every condition has its test, 1 when one survived, 2 when that could not be found out.
"""

import argparse
import fcntl
import fnmatch
import json
import os
import re
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass, field
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
STORE = Path("common/src")
MONGO = STORE / "mongo/mod.rs"  # where the switch goes
VARIABLE = "RECRUITER_DROPPED_CONDITION"

# Who is to notice: the second only if the first does not.
TESTS = [("guards", []), ("it", ["store::"])]
# Seconds; far longer than they ever take.
TESTS_MAY_TAKE = 600

# Functions that make a filter without writing it out, each with the reason why its conditions need not be found.
OPAQUE = {
    "has_room": "the slots, the room ahead and the permits of each worker: guards::roster::jobs_are_assigned…, guards::limits::a_permit_that_is_held…",
    "foreign": "documents of an application: it::shared_database::each_collection…",
    "condition": "which classes and outcomes a period of retention covers: guards::retention::retention_by_class…",
    "any_worker": "documents of an application: it::shared_database::the_cleaner_leaves…",
    "no_later_in": "no later term, in cells of rates and the relay: guards::limits::the_cells_of_slow_rates…",
    "fields": "what a person asks to see in a list: tests/tests/it/cli.rs and operator.rs",
    "ours": "documents of Recruiter: it::shared_database::what_looks_like_ours…",
    "range": "where a walk over many jobs goes on: tests/tests/it/operator.rs",
}

# Conditions whose loss no test can see, each with the reason.
PARTIAL = "the index that the query names has no other jobs; the query says so for its reader"
IMPLIED = {
    "due_in_walk/locked": PARTIAL,
    "due_in_walk/gate": "without it the answer is the same: the caller leaves out what is in no lane that it has asked about",
    "expired_jobs/locked": PARTIAL,
    "permit_holders/held_permits.0": "without it the answer is the same: the caller leaves out who holds none",
    "release_orphaned_successors/unique_after": PARTIAL,
    "waiting_at/locked": PARTIAL,
    "waiting_in/gate": PARTIAL,
    "waiting_in/locked": PARTIAL,
    "waiting_jobs/waiting": PARTIAL,
    "prune_files/_id=$in : jobs_of_files": "without it the answer is the same: the caller looks up what it has asked for",
    "prune_chunks/_id": "without it the answer is the same: the caller looks up what it has asked for",
    "prune_chunks/n": "without it each chunk of a file is read, and the answer is the same",
    "class_defaults/_id": "without it the answer is the same: the caller leaves out what is no class",
    "policies_of_due_jobs/_id": "without it the answer is the same: the caller looks up what it has asked for",
    "cells/_id": "without it the answer is the same: the caller leaves out what is no cell",
    "halted_lines/_id": "without it the answer is the same: the caller leaves out what it has not asked for",
    "results_of/_id": "without it the answer is the same: the caller looks up what it has asked for",
}

ASKS = "update_one update_many replace_one delete_one delete_many find find_one find_one_and_update count_documents".split()
# Ways to ask that are not used yet: the first use names the position of its filter here.
UNKNOWN_ASKS = "aggregate bulk_write find_one_and_delete find_one_and_replace watch".split()
# What asks without any condition, each with the reason.
WHOLE = {
    ".aggregate(copies)": "the chunks of one file, in parts: `files::a_job_that_is_enqueued_again…` compares the copy",
    '.aggregate([doc! { "$sort": { "group": 1, "workable.class": 1 } }, lanes])': "every lane there is",
    '.aggregate([selection, doc! { "$group": { "_id": field } }])': "the groups; classes and gates: guards::due::jobs_with_a_gate…",
    ".aggregate(pipeline)": "the jobs of each lane, and the heads of lines: it::limits and rounds",
    ".aggregate(stages)": "every setting",
    ".watch().batch_size(0)": "a position, without an event: it::messages",
    ".watch().pipeline(stages)": "the topics of a subscriber: it::messages",
}
# The other parts of the whole queries above.
UNIONS = ('"pipeline": Vec::from(stages)', '"pipeline": [{ "$match": only }, from(collection)]', '"pipeline": [this]')
UNKNOWN_KEYS = "deletes filter findAndModify pipeline query".split()
# What may be done with a part of a filter without changing it.
HARMLESS = "clone is_empty iter into_iter len map".split()
LOGICAL = ("$and", "$or", "$expr")
BARE_ID = r'[\w.]+|"\w+"'

# Goes into the room `mongo` in the copy.
SWITCH = """
pub(crate) fn keeps(condition: &str) -> bool {
    std::env::var("%s").as_deref() != Ok(condition)
}

pub(crate) fn without(filter: bson::Document, conditions: &[(&str, &[&str])]) -> bson::Document {
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
    """The store is written in a way that this script does not know."""


# --- Rust, as far as it is needed ---


def masked(text):
    """The same text with comments and the insides of strings blanked: brackets and words are code, offsets stay."""

    def blank(found):
        inner = re.sub(r"[^\n]", " ", found[0])
        return '"' + inner[1:-1] + '"' if found[0].endswith('"') else inner

    token = r"//[^\n]*|/\*.*?\*/|\"(?:\\.|[^\"\\])*\"|'(?:\\.[^']*|[^'\\])'"
    return re.sub(token, blank, text, flags=re.DOTALL)


def depth(letter):
    return (letter in "([{") - (letter in ")]}")


def closing(code, opening):
    """Where the bracket that opens there is closed."""
    level = 0
    for at in range(opening, len(code)):
        level += depth(code[at])
        if level == 0:
            return at
    raise NotUnderstood("a bracket is not closed")


def split(code, start, end=None, separator=",", angles=False):
    """The spans between separators outside of brackets, up to the end or where an outer bracket closes."""
    level, begin, spans = 0, start, []
    at = start
    for at in range(start, len(code) if end is None else end):
        level += depth(code[at])
        if angles and code[at - 1] != "-":
            level += (code[at] == "<") - (code[at] == ">")
        if level < 0:
            break
        if code[at] == separator and level == 0:
            spans.append((begin, at))
            begin = at + 1
    else:
        at += 1
    spans.append((begin, at))
    return [span for span in (trimmed(code, *span) for span in spans) if span[0] < span[1]]


def trimmed(code, start, end):
    inner = code[start:end]
    return start + len(inner) - len(inner.lstrip()), end - len(inner) + len(inner.rstrip())


@dataclass
class Function:
    name: str
    parameters: list  # names and types, without `self`
    is_method: bool
    is_async: bool
    returns: str
    body: tuple

    def makes_documents(self):
        return not self.is_async and re.search(r"\bDocument\b", self.returns)


class Source:
    """One file of the store, without its unit tests."""

    def __init__(self, path):
        self.path, self.text = path, (ROOT / path).read_text()
        code = masked(self.text)
        tests = re.search(r"#\[cfg\(test\)\]\s*mod ", code)
        self.code = code[: tests.start()] if tests else code
        heads = re.finditer(r"\bfn (\w+)\s*([<(])", self.code)
        self.functions = [function for function in map(self.function, heads) if function]

    def function(self, head):
        opening = head.end() - 1
        if head[2] == "<":
            opening = self.code.index("(", split(self.code, head.end(), separator=">", angles=True)[0][1])
        end = closing(self.code, opening)
        brace, semicolon = self.code.find("{", end), self.code.find(";", end)
        if brace < 0 or 0 <= semicolon < brace:
            return None
        parameters = [self.text[slice(*span)] for span in split(self.code, opening + 1, angles=True)]
        is_method = bool(parameters) and re.fullmatch(r"(&\s*)?(mut )?self", parameters[0]) is not None
        named = [[part.strip() for part in one.removeprefix("mut ").split(":", 1)] for one in parameters[is_method:]]
        is_async = self.code[: head.start()].rstrip().endswith("async")
        return Function(head[1], named, is_method, is_async, self.code[end + 1 : brace], (brace + 1, closing(self.code, brace)))

    def around(self, at):
        """The innermost function around a place."""
        return max((one for one in self.functions if one.body[0] <= at < one.body[1]), key=lambda one: one.body[0])

    def line(self, at):
        return self.text.count("\n", 0, at) + 1

    def lost(self, at, why):
        return NotUnderstood(f"{self.path}:{self.line(at)}: {why}: {' '.join(self.text[at : at + 80].split())}")


# --- filters and their conditions ---


@dataclass
class Condition:
    source: Source
    at: int
    function: str
    key: str
    value: str
    name: str = ""
    literal: int = 0  # the brace of the document it stands in,
    path: list = field(default_factory=list)  # and the way to it
    statement: tuple = ()  # or the statement that inserts it


class Filters:
    """Everything in the store that says which documents are meant, and its conditions."""

    def __init__(self):
        files = sorted((ROOT / STORE).rglob("*.rs"))
        self.sources = [Source(path.relative_to(ROOT)) for path in files]
        self.conditions, self.seen = [], set()
        for source in self.sources:
            for span in self.asked(source):
                self.follow(source, span, "this filter")
        self.conditions.sort(key=lambda one: (one.source.path, one.at))
        self.name_them()

    def asked(self, source):
        """The expressions that are passed as filters."""
        for found in re.finditer(r"\.(\w+)\(", source.code):
            if found[1] in UNKNOWN_ASKS and not source.text.startswith(tuple(WHOLE), found.start()):
                raise source.lost(found.start(), "a way to ask that this script does not know")
            arguments = split(source.code, found.end())
            # Iterators have a `find`, too: of a closure, written there or named like a predicate.
            if found[1] in ASKS and arguments and not re.match(r"\||(is|has)_\w+$", source.code[slice(*arguments[0])]):
                yield arguments[0]
            if found[1] == "distinct" and not source.text.startswith(tuple(WHOLE), found.start()):
                yield arguments[1]
        for found in re.finditer(r'"[^"]*"(?=(\s*):[^:])', source.code):
            key = source.text[found.start() + 1 : found.end() - 1]
            if key in UNKNOWN_KEYS and not source.text.startswith(UNIONS, found.start()):
                raise source.lost(found.start(), "a command that this script does not know")
            if key == "q":
                yield split(source.code, found.end(1) + 1)[0]

    def follow(self, source, span, what):
        """Follows an expression that is, or is part of, a filter to its documents; there must be some."""
        if not self.trace(source, span):
            raise source.lost(span[0], f"it cannot be followed what makes {what}")

    def trace(self, source, span):
        """Finds the documents that an expression is made of; says whether there are any."""
        if (source, span) in self.seen:
            return True
        self.seen.add((source, span))
        start, end = span
        if source.code[start] == "{":
            self.document(source, start)
            return True
        documents, code = [], source.code[start:end]
        while made := re.search(r"\bdoc! (?=\{)", code):
            last = closing(code, made.end())
            documents.append(start + made.end())
            code = code[: made.start()] + " " * (last + 1 - made.start()) + code[last + 1 :]
        for brace in documents:
            self.document(source, brace)
        found = bool(documents)
        # What is asked in an `if` or a `match` makes nothing.
        code = re.sub(r"\b(if|match)\b[^{]*", lambda asked: " " * len(asked[0]), code)
        for word in re.finditer(r"(\.?)\b([a-z_]\w*)\b(\(?)(?!!|::)", code):
            dot, name, call = word.groups()
            at = start + word.start(2)
            if call:
                found |= self.called(source, at, name, bool(dot))
            elif not dot:
                found |= self.variable(source, at, name)
        if not found:
            self.seen.discard((source, span))
        return found

    def called(self, source, at, name, is_method):
        """Follows a call to a function of the store that makes a document."""
        made = [(of, one) for of in self.sources for one in of.functions if one.name == name and one.is_method == is_method]
        made = [(of, one) for of, one in made if one.makes_documents()]
        # An option has a `filter`, too.
        if not made or source.code[source.code.index("(", at) + 1] == "|":
            return False
        for of, one in made if name not in OPAQUE else []:
            if re.search(r"\breturn\b", of.code[slice(*one.body)]):
                raise of.lost(one.body[0], f"`{name}` returns in several places")
            self.follow(of, split(of.code, *one.body, ";")[-1], f"what `{name}` returns")
        return True

    def variable(self, source, at, name):
        """Follows a variable or an argument to what it holds."""
        function = source.around(at)
        begin = function.body[0]
        for index, (parameter, kind) in enumerate(function.parameters):
            if parameter == name and re.search(r"\bDocument\b", kind):
                return self.passed(function, index)
        let = rf"\blet\s+(?:(?:mut\s+)?{name}\b(?:\s*:[^=;]*)?|\(([^()]*\b{name}\b[^()]*)\))\s*=(?!=)"
        declared = [(begin + found.end(), found[1]) for found in re.finditer(let, source.code[begin:at])]
        if not declared:
            return False
        start, names = declared[-1]
        value = split(source.code, start, separator=";")[0]
        if names and source.code[value[0]] == "(" and closing(source.code, value[0]) == value[1] - 1:
            index = [one.strip().removeprefix("mut ") for one in names.split(",")].index(name)
            value = split(source.code, value[0] + 1)[index]
        if value[0] <= at < value[1]:
            return False
        found = self.trace(source, value)
        return self.changed(source, (start, function.body[1]), name, found) or found

    def changed(self, source, scope, name, is_filter):
        """Follows what is added to a variable later."""
        found, changes = False, []
        for use in re.finditer(rf"(?<![\w.]){name}\.(\w+)\(", source.code[slice(*scope)]):
            opening = scope[0] + use.end() - 1
            if use[1] in ("push", "extend"):
                found |= self.trace(source, (opening + 1, closing(source.code, opening)))
            else:
                changes.append((use[1], scope[0] + use.start(), opening))
        for change, at, opening in changes if is_filter or found else []:
            if change == "insert":
                self.inserted(source, at, opening)
            elif change not in HARMLESS:
                raise source.lost(at, f"it cannot be followed what becomes of `{name}`")
        return found

    def inserted(self, source, at, opening):
        """A condition that a statement adds to a filter."""
        if (source, at) in self.seen:
            return
        self.seen.add((source, at))
        key, value = split(source.code, opening + 1)
        key, end = source.text[slice(*key)], closing(source.code, opening) + 1
        if not re.fullmatch(r'"[^"]*"', key) or source.code[end] != ";":
            raise source.lost(at, "it cannot be followed what is inserted")
        one = Condition(source, at, source.around(at).name, key.strip('"'), source.text[slice(*value)], statement=(at, end + 1))
        self.conditions.append(one)

    def passed(self, function, index):
        """Follows an argument to what every caller passes."""
        calls = 0
        for source in self.sources:
            for call in re.finditer(rf"(\.|(?<![\w.])){function.name}\(", source.code):
                if bool(call[1]) == function.is_method and not source.code[: call.start()].endswith("fn "):
                    self.follow(source, split(source.code, call.end())[index], f"what is passed to `{function.name}`")
                    calls += 1
        return calls > 0

    def document(self, source, brace):
        if (source, brace) not in self.seen:
            self.seen.add((source, brace))
            self.keys(source, brace, brace, [])

    def keys(self, source, literal, brace, path):
        """The conditions of a document, all of which must hold."""
        for key, value in self.entries(source, brace):
            way = [*path, key]
            if key == "_id" and re.fullmatch(BARE_ID, source.text[slice(*value)]):
                continue
            if key == "$nor":
                raise source.lost(value[0], "a condition that this script does not know")
            if key == "$expr" and self.is_logical(source, value[0]):
                self.keys(source, literal, value[0], way)
            elif key == "$and":
                self.members(source, literal, value, way)
            else:
                self.add(source, literal, key, value if key != "$or" else (value[0], value[0]), way)
                if key == "$or":
                    self.members(source, literal, value, way)

    def members(self, source, literal, value, path):
        """The members of `$and` or `$or`, each a condition or several."""
        if source.code[value[0]] != "[":
            return self.follow(source, value, f"the members of `{path[-1]}`")
        for index, (start, _) in enumerate(split(source.code, value[0] + 1)):
            if (call := re.match(r"(?:\w+\.)*(\w+)\(", source.code[start:])) and call[1] in OPAQUE:
                continue
            entries, way = self.entries(source, start), [*path, str(index)]
            if len(entries) > 1 or self.is_logical(source, start):
                self.keys(source, literal, start, way)
            else:
                self.add(source, literal, *entries[0], way)

    def is_logical(self, source, brace):
        return source.code[brace] == "{" and any(key in LOGICAL for key, _ in self.entries(source, brace))

    def entries(self, source, brace):
        """Keys of a document and the spans of their values."""
        if source.code[brace] != "{":
            raise source.lost(brace, "a document was expected")
        entries = []
        for start, end in split(source.code, brace + 1):
            colon = source.code.index(":", split(source.code, start, end, ":")[0][1])
            key = re.search(r'"([^"]*)"', source.text[start:colon])
            if not key:
                raise source.lost(start, "a key was expected")
            entries.append((key[1], trimmed(source.code, colon + 1, end)))
        return entries

    def add(self, source, literal, key, value, path):
        function, text = source.around(literal).name, source.text[slice(*value)]
        self.conditions.append(Condition(source, value[0], function, key, text, literal=literal, path=path))

    def name_them(self):
        """Names each condition by its function and key, and by its value where these do not tell it from others."""
        keys = [(one.function, one.key) for one in self.conditions]
        for one in self.conditions:
            value = " ".join(re.sub(r'["\[\]{},]', " ", one.value).split())
            is_operator = one.key.startswith("$") and one.key != "$or"
            alike = keys.count((one.function, one.key)) > 1
            one.name = f"{one.function}/{one.key}" + (f" {value}" if is_operator else f"={value}" if alike else "")
        names = [one.name for one in self.conditions]
        for one in self.conditions:
            if names.count(one.name) > 1:
                raise one.source.lost(one.at, f"two conditions go by the name {one.name}")


# --- the copy ---


def switched(source, conditions):
    """The text of a file with every condition behind the switch."""
    insertions, literals = [], {}
    for one in conditions:
        name = json.dumps(one.name)
        if one.statement:
            insertions += [(one.statement[0], f"if crate::mongo::keeps({name}) {{ "), (one.statement[1], " }")]
        else:
            path = ", ".join(map(json.dumps, one.path))
            literals.setdefault(one.literal, []).append(f"({name}, &[{path}][..])")
    for brace, droppable in literals.items():
        macro = "doc! " if source.text[:brace].endswith("doc! ") else ""
        insertions += [
            (brace - len(macro), "crate::mongo::without(" + ("" if macro else "bson::doc! ")),
            (closing(source.code, brace) + 1, f", &[{', '.join(droppable)}])"),
        ]
    text = source.text
    for at, more in sorted(insertions, key=lambda one: one[0], reverse=True):
        text = text[:at] + more + text[at:]
    return text


def alone(directory):
    """Keeps others out of the directory for as long as the returned file is open."""
    lock = open(directory / "lock", "w")
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        fail(f"{directory} is in use; name another with --directory, or wait")
    return lock


def copy(filters, to):
    """Makes the copy what the workspace is now, with switches; leaves alone what has not changed, for cargo's sake."""
    wanted = {}
    for directory, names, files in os.walk(ROOT):
        names[:] = [name for name in names if name not in (".git", "target")]
        for path in (Path(directory, file) for file in files):
            wanted[path.relative_to(ROOT)] = path.read_bytes()
    for source in filters.sources:
        wanted[source.path] = switched(source, [one for one in filters.conditions if one.source is source]).encode()
    wanted[MONGO] += SWITCH.encode()
    for path in [path for path in to.rglob("*") if path.is_file() and path.relative_to(to) not in wanted]:
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
        fail("the copy does not compile; if the workspace does, the switch is at fault")
    messages = map(json.loads, built.stdout.splitlines())
    return {said["target"]["name"]: said["executable"] for said in messages if said.get("executable")}


def failures(program, tests, workspace, dropped):
    """The tests that fail while this condition is dropped."""
    command, environment = [program, *tests], {**os.environ, VARIABLE: dropped}
    try:
        ran = subprocess.run(
            command, cwd=workspace / "tests", env=environment, capture_output=True, text=True, timeout=TESTS_MAY_TAKE, check=False
        )
    except subprocess.TimeoutExpired:
        fail(f"{' '.join(command)} has not ended within {TESTS_MAY_TAKE} s while `{dropped}` was dropped")
    verdicts = re.findall(r"^test (\S+).* \.\.\. (ok|FAILED)$", ran.stdout, re.MULTILINE)
    failed = sorted(name for name, verdict in verdicts if verdict == "FAILED")
    if not verdicts or ran.returncode != (101 if failed else 0):
        fail(f"{' '.join(command)} ended with {ran.returncode} without saying why:\n{ran.stdout}\n{ran.stderr}")
    return failed


def killers(programs, workspace, dropped):
    """The tests that notice that this condition is dropped."""
    return next(filter(None, (failures(programs[name], tests, workspace, dropped) for name, tests in TESTS)), [])


# --- the report ---


def say(line, end="\n"):
    print(line, end=end, file=sys.stderr, flush=True)


def fail(why):
    say(why)
    sys.exit(2)


def arguments():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--list", action="store_true", help="only say which conditions there are, and where")
    parser.add_argument("--only", action="append", metavar="NAME", help="only these; `*` stands for anything; can be repeated")
    parser.add_argument("--json", action="store_true", help="the report as JSON")
    parser.add_argument(
        "--directory",
        type=Path,
        default=Path(tempfile.gettempdir(), "recruiter-guards"),
        help="where the copy is built; kept, so that the next time is shorter (default: %(default)s)",
    )
    return parser.parse_args()


def found():
    """All conditions, checked against what this file says of them."""
    try:
        filters = Filters()
    except NotUnderstood as lost:
        fail(f"{lost}\nteach tests/guards.py what that is")
    return filters


def examine(one, programs, workspace):
    """One line of the report."""
    line = {"condition": one.name, "file": str(one.source.path), "line": one.source.line(one.at)}
    begun = time.monotonic()
    return line | {"killers": killers(programs, workspace, one.name), "seconds": round(time.monotonic() - begun, 1)}


def verdict(line):
    return ", ".join(line["killers"]) or "SURVIVED"


def main():
    asked = arguments()
    filters = found()
    if strange := IMPLIED.keys() - {one.name for one in filters.conditions}:
        fail(f"no condition goes by the name {', '.join(strange)}: take it out of IMPLIED")
    tested = [one for one in filters.conditions if one.name not in IMPLIED]
    wanted = [one for one in tested if any(fnmatch.fnmatchcase(one.name, only) for only in asked.only or ["*"])]
    if not wanted:
        fail("no condition goes by that name; see --list")
    if asked.list:
        for one in wanted:
            print(f"{one.source.path}:{one.source.line(one.at)}: {one.name}")
        return

    os.nice(10)
    started = time.monotonic()
    workspace = asked.directory / "workspace"
    workspace.mkdir(parents=True, exist_ok=True)
    _lock = alone(asked.directory)
    say(f"{len(filters.conditions)} conditions; building in {asked.directory}")
    copy(filters, workspace)
    programs = build(workspace, asked.directory / "target")
    say(f"built after {time.monotonic() - started:.0f} s; the tests with all conditions in place")
    for name, tests in TESTS:
        if failed := failures(programs[name], tests, workspace, ""):
            fail(f"they do not pass: {', '.join(failed)}")

    report = []
    for number, one in enumerate(wanted, 1):
        say(f"[{number}/{len(wanted)}] {one.name}: ", end="")
        report.append(examine(one, programs, workspace))
        say(verdict(report[-1]))
    survivors = [line["condition"] for line in report if line.get("killers") == []]
    if asked.json:
        print(json.dumps({"conditions": report, "survivors": survivors}, indent=2))
    else:
        width = max(len(line["condition"]) for line in report)
        for line in report:
            print(f"{line['condition']:<{width}}  {verdict(line)}")
    say(f"{len(report)} conditions, {len(survivors)} of them survived; {time.monotonic() - started:.0f} s")
    sys.exit(1 if survivors else 0)


if __name__ == "__main__":
    main()

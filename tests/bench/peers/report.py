"""The tables and the ratios."""

from . import ordinary

OURS = "recruiter"


def tables(outcome):
    told = outcome["systems"]
    machine(outcome["machine"])
    ours = told.get(OURS, {})
    print("\nThroughput: jobs of no work a second, median\n")
    rows = [["SYSTEM", "PER SECOND", "OURS IS", "RUNS", "DURABILITY", "A COMPLETED JOB IS"]]
    for one in told.values():
        runs = [f"{run['jobs_per_second']:,.0f}" for run in one["runs"]["burn_down"]]
        figure = f"{one['per_second']:,.0f}" if one["per_second"] else "not measured"
        unit = "" if one["unit"] == "jobs" else f" {one['unit']}"
        times = ratio(ours.get("per_second"), one["per_second"])
        rows.append([title(one), figure + unit, times, " ".join(runs), one["durability"], one["completed_job_is"]])
    table(rows, right={1, 2})

    if any(one["started_ms"] for one in told.values()):
        print("\nLatency on an idle system: milliseconds from the acknowledged enqueue until the handler is entered\n")
        rows = [["SYSTEM", "P50", "P99", "OURS IS, P50", "P99", "SETTINGS"]]
        for one in told.values():
            at, mine = one["started_ms"], ours.get("started_ms") or {}
            if at:
                times = [ratio(at[name], mine.get(name)) for name in ("p50", "p99")]
                settings = words(one["latency_settings"]) or "defaults"
                rows.append([title(one), f"{at['p50']:.2f}", f"{at['p99']:.2f}", *times, settings])
        table(rows, right={1, 2, 3, 4})
    print("\n“Ours is 2.0x” means: twice as many jobs a second, half the milliseconds.")

    print("\nSettings, the best of those tried\n")
    for one in told.values():
        print(f"  {title(one)}: {words(one['settings']) or 'defaults'}")
    servers(told, "runs BullMQ, graphile-worker, Keuss and Agenda")
    troubles(outcome)


def ordinary_table(outcome):
    """A row for each load, a column for each system."""
    told = outcome["systems"]
    machine(outcome["machine"])
    rounds = outcome["options"]["rounds"]
    print(
        f"\nOrdinary jobs: jobs a second, {'one run' if rounds == 1 else f'median of {rounds} rounds'}; "
        f"each system has {ordinary.PROCESSES} worker processes of {ordinary.SLOTS_EACH} slots\n"
    )
    rows = [["JOBS OF", "IDEAL", *(title(one).upper() for one in told.values())]]
    for number, load in enumerate(ordinary.LOADS):
        figures = [one["rows"][number]["per_second"] for one in told.values()]
        ideal = f"{load.ideal:,.0f}" if load.ideal else "-"
        rows.append([str(load), ideal, *(f"{figure:,.0f}" if figure else "not measured" for figure in figures)])
    table(rows, right=set(range(1, len(rows[0]))))
    print(f"\nIdeal: none of the {ordinary.SLOTS} slots is ever idle. The last row may exceed it: when the clock")
    print("stops, after as many jobs as there are short ones, some of the long jobs are still running.")

    print("\nDurability, and what a completed job is\n")
    rows = [[title(one), one["durability"], one["completed_job_is"]] for one in told.values()]
    table([["SYSTEM", "DURABILITY", "A COMPLETED JOB IS"], *rows], right=set())

    print("\nSettings, the best of those tried for each row\n")
    for one in told.values():
        chosen = {}
        for row in one["rows"]:
            chosen.setdefault(words(row["settings"]), []).append(row["job"])
        if len(chosen) == 1:
            print(f"  {title(one)}: {next(iter(chosen)) or 'none'}")
            continue
        print(f"  {title(one)}:")
        for settings, jobs in chosen.items():
            print(f"    {'; '.join(jobs)}: {settings}")
    servers(told, "runs BullMQ and graphile-worker")
    troubles(outcome)


def machine(one):
    print(f"{one['cores']} cores, {one['processor']}, {one['system']}")
    if one["load_at_start"] > 0.5:
        print(f"The machine was busy at the start (load {one['load_at_start']:.1f}): these are not its best figures.")


def servers(told, runs):
    """The databases under the systems, and what runs those that are no programs by themselves."""
    known = {}
    for one in told.values():
        if one["server_version"]:
            known[f"{one['server']} {one['server_version']}"] = one["server_conditions"]
        if one["runtime"]:
            known[one["runtime"]] = runs
    print()
    for server, conditions in known.items():
        print(f"  {server}: {conditions}")


def troubles(outcome):
    if outcome["troubles"]:
        print("\nNot measured, or not in full\n")
        for trouble in outcome["troubles"]:
            reason = trouble["reason"].replace("\n", "\n      ")
            print(f"  {trouble['system']}: {trouble['doing']} failed: {reason}")


def title(one):
    return f"{one['title']} {one['version'] or ''}".strip()


def ratio(ours, theirs):
    """How many times better: ours by theirs for rates; the caller turns it around for times."""
    if not ours or not theirs:
        return "-"
    times = ours / theirs
    return f"{times:.2f}x" if times < 10 else f"{times:.0f}x"


def words(settings):
    if not settings:
        return ""
    parts = []
    for name, value in settings.items():
        parts.append(words(value) if isinstance(value, dict) else f"{name} {value}")
    return ", ".join(parts)


def table(rows, right):
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    for row in rows:
        cells = [
            cell.rjust(width) if column in right else cell.ljust(width)
            for column, (cell, width) in enumerate(zip(row, widths, strict=True))
        ]
        print(("  " + "  ".join(cells)).rstrip())


def processor():
    try:
        with open("/proc/cpuinfo") as lines:
            return next(line.split(":", 1)[1].strip() for line in lines if line.startswith("model name"))
    except (OSError, StopIteration):
        import platform

        return platform.processor() or platform.machine()

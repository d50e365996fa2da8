"""The tables and the ratios."""

OURS = "recruiter"


def tables(outcome):
    machine, told = outcome["machine"], outcome["systems"]
    print(f"{machine['cores']} cores, {machine['processor']}, {machine['system']}")
    if machine["load_at_start"] > 0.5:
        print(f"The machine was busy at the start (load {machine['load_at_start']:.1f}): these are not its best figures.")

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
    servers = {}
    for one in told.values():
        print(f"  {title(one)}: {words(one['settings']) or 'defaults'}")
        if one["server_version"]:
            servers[f"{one['server']} {one['server_version']}"] = one["server_conditions"]
        if one["runtime"]:
            servers[one["runtime"]] = "runs BullMQ, graphile-worker, Keuss and Agenda"
    print()
    for server, conditions in servers.items():
        print(f"  {server}: {conditions}")

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

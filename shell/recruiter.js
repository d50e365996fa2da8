// Helpers for those who look at Recruiter in the mongo shell. They only read.
//
//     mongosh "$MONGODB_URI" --shell recruiter.js        or in an open shell: load("recruiter.js")
//
//     jobs.why(id)           why a job does not run, in a sentence; `recruiter jobs why` knows more
//     jobs.story(id)         its executions, one line each
//     jobs.failed({class: "mail"}, 20)        the newest dead letters; both arguments can be left out
//     jobs.running()         running jobs: where, and since when
//     jobs.waiting()         waiting jobs by group and class
//     workers()              the roster: slots, jobs, last heartbeat
//     limits()               limits of resources and groups, and how many permits are in use
//     line("customer:17")    the unfinished jobs of a line, in their order
//     recruiterPrefix = "jobs_"               if the collections have a prefix (--collection-prefix)
//     recruiterReveal = true                  to see the error messages of classes that are redacted (`recruiter redaction`)

var recruiterPrefix = globalThis.recruiterPrefix ?? "";
var recruiterReveal = globalThis.recruiterReveal ?? false;

var { jobs, workers, limits, line } = (() => {
  const of = (name) => db.getCollection(recruiterPrefix + name);
  const idOf = (id) => (typeof id === "string" ? ObjectId(id) : id);
  // Dates in the documents are those of the server's clock.
  const now = () => db.hello().localTime;
  const number = (value) => (value == null ? undefined : Number(value));
  const list = (value) => (Array.isArray(value) ? value : value == null ? [] : [value]);

  const apart = (from, to) => {
    const seconds = Math.round(Math.abs(to - from) / 1000);
    const parts = [["d", Math.floor(seconds / 86400)], ["h", Math.floor(seconds / 3600) % 24], ["m", Math.floor(seconds / 60) % 60], ["s", seconds % 60]];
    const first = parts.findIndex(([, count]) => count > 0);
    return first < 0 ? "0s" : parts.slice(first, first + 2).filter(([, count]) => count > 0).map(([unit, count]) => count + unit).join(" ");
  };

  const isAlive = (worker, at) => !worker.retired && at - worker.last_seen_at <= (number(worker.lease_ms) || 20000);
  const takes = (worker, group) => worker.work_on === "*" || list(worker.work_on).includes(group);
  const whoIs = (worker) => `${worker._id} (${worker.hostname}:${worker.pid})`;
  const pauseOf = (id) => of("pauses").findOne({ _id: id });

  /** The limit of a resource: that of its name, or of the longest prefix. */
  const limitOf = (resource) => {
    if (resource.startsWith("@")) return of("groups").findOne({ _id: resource.slice(1) });
    const named = of("limits").findOne({ _id: resource });
    if (named) return named;
    const prefixes = of("limits").find({ _id: /\*$/ }).toArray().filter(({ _id }) => resource.startsWith(_id.slice(0, -1)));
    return prefixes.sort((one, other) => other._id.length - one._id.length)[0];
  };
  /** Several documents may name a permit while it goes from one worker to another. */
  const inUse = (resource) => {
    const names = of("roster").find({}, { held_permits: 1 }).toArray().flatMap((worker) => list(worker.held_permits));
    return new Set(names.filter((name) => name.slice(0, name.lastIndexOf("#")) === resource)).size;
  };
  const headOf = (gate) => of("scheduled").find({ gate }).sort({ created_at: 1, _id: 1 }).limit(1).next();

  const whyRunning = (job, at) => {
    const worker = of("roster").findOne({ _id: job.last_execution?.worker });
    if (worker && isAlive(worker, at)) return `running: it runs on worker ${whoIs(worker)} since ${apart(job.last_execution.started_at, at)}`;
    return "dead-worker: its worker seems to be dead; a cleaner ends the execution, so check that recruiter-cleaner runs";
  };

  const whyNobody = ({ group, workable: { class: kind } }, at) => {
    const lease = of("metadata").findOne({ _id: "recruiter" });
    if (!lease || lease.released || at - lease.renewed_at > (number(lease.lease_ms) || 30000)) {
      return "no-recruiter: no recruiter leads; start `recruiter run`";
    }
    const able = of("roster").find({ classes: kind }).toArray().filter((worker) => takes(worker, group));
    if (able.some((worker) => isAlive(worker, at) && !worker.wanted)) return undefined;
    if (able.some((worker) => !worker.retired && !isAlive(worker, at))) return `worker-silent: the workers that take \`${kind}\` do not answer`;
    return `no-worker: no running worker has the class \`${kind}\` and works on the group \`${group}\``;
  };

  const whyRefused = ({ _id, gate, group, workable: { class: kind } }) => {
    const paused = ["everything", `group:${group}`, `class:${kind}`].map(pauseOf).find(Boolean);
    if (paused) return `paused: ${paused._id} is paused by ${paused.by}${paused.reason ? `: ${paused.reason}` : ""}`;
    if (gate && gate.startsWith(">")) {
      const halt = pauseOf(`line:${gate.slice(1)}`);
      if (halt) return `paused: its line is halted by ${halt.by}${halt.reason ? `: ${halt.reason}` : ""}`;
      const head = headOf(gate);
      return head._id.equals(_id) ? undefined : `behind: job ${head._id} of its line must be finished first`;
    }
    for (const resource of [`@${group}`, ...(gate ? gate.split(",") : [])]) {
      const limit = limitOf(resource);
      if (!limit && !resource.startsWith("@")) return `limit-undefined: there is no limit \`${resource}\`; set one with \`recruiter limits set\``;
      const capacity = number(limit?.capacity);
      if (capacity !== undefined && inUse(resource) >= capacity) return `limit-full: all ${capacity} permits of \`${resource}\` are in use`;
    }
    return undefined;
  };

  const why = (id) => {
    const [job, at] = [of("scheduled").findOne({ _id: idOf(id) }), now()];
    if (!job) {
      const archived = of("archived").findOne({ _id: idOf(id) }, { why: 1, "last_execution.ended_at": 1 });
      return archived ? `finished: ${archived.why}, ${apart(archived.last_execution.ended_at, at)} ago` : "there is no job with this id";
    }
    if (job.locked) return whyRunning(job, at);
    if (job.expires_at <= at) return `expired: it expired ${apart(job.expires_at, at)} ago; a cleaner archives it`;
    if (job.waiting) {
      const parents = list(job.waits_for).map((parent) => parent.job ?? parent);
      const open = of("scheduled").find({ _id: { $in: parents } }, { _id: 1 }).toArray().map((parent) => parent._id);
      return open.length ? `waits-for-jobs: it waits for the end of ${open.join(", ")}` : "released-soon: all jobs that it waited for have ended";
    }
    if (job.unique_after) {
      const other = of("scheduled").findOne({ unique: job.unique_after }, { _id: 1 });
      return other ? `waits-for-predecessor: it runs once more after job ${other._id}` : "released-soon: a cleaner makes it due within seconds";
    }
    if (job.scheduled_at > at) return `not-due: it is due in ${apart(at, job.scheduled_at)} (${job.scheduled_at.toISOString()})`;
    return whyNobody(job, at) ?? whyRefused(job) ?? `assignable: it is due since ${apart(job.scheduled_at, at)}; \`recruiter jobs why ${job._id}\` knows more`;
  };

  /** What shows the messages of a class, unless it is redacted. Rules that are not valid redact everything. */
  const messages = () => {
    const stored = recruiterReveal ? null : of("metadata").findOne({ _id: "redaction" });
    const rules = !stored ? [] : Array.isArray(stored.rules) ? stored.rules : [null];
    const matches = (rule, kind) => {
      if (typeof rule?.class !== "string" || typeof kind !== "string") return true;
      return rule.class.endsWith("*") ? kind.startsWith(rule.class.slice(0, -1)) : kind === rule.class;
    };
    return (kind, message) => (rules.some((rule) => matches(rule, kind)) ? "[redacted]" : message);
  };

  const briefly = (shown) => ({ _id, group, workable, why, last_execution: last }) => ({
    _id, class: workable?.class, group, why, ended_at: last?.ended_at, error: last?.class && `${last.class}: ${shown(workable?.class, last.message)}`,
  });
  const toLine = (shown, of_class) => ({ started_at, ended_at, hostname, pid, class: kind, message }) => {
    const took = ended_at ? `, took ${(ended_at - started_at) / 1000} s` : ", runs";
    return `${started_at && started_at.toISOString()} on ${hostname}:${pid}${took}${kind ? `: ${kind}: ${shown(of_class, message)}` : ""}`;
  };

  return {
    jobs: {
      why,
      story(id) {
        const job = of("scheduled").findOne({ _id: idOf(id) }) ?? of("archived").findOne({ _id: idOf(id) });
        if (!job) return ["there is no job with this id"];
        const last = job.last_execution;
        const isListed = list(job.executions).some(({ start }) => start && last?.start && start.equals(last.start));
        const executions = [...list(job.executions), ...(last && !isListed ? [last] : [])];
        return [`enqueued ${(job.created_at ?? job._id.getTimestamp()).toISOString()}`, ...executions.map(toLine(messages(), job.workable?.class)), why(job._id)];
      },
      failed({ class: kind, group } = {}, most = 20) {
        const of_class = { ...(kind && { "workable.class": kind }), ...(group && { group }) };
        return of("archived").find({ why: { $nin: ["done", "cancelled"] }, ...of_class }).sort({ "last_execution.ended_at": -1 }).limit(most).toArray().map(briefly(messages()));
      },
      running() {
        const [listed, at] = [of("roster").find().toArray().flatMap((worker) => list(worker.working_on)), now()];
        const found = of("scheduled").find({ _id: { $in: listed }, locked: true }).toArray();
        return found.map(({ _id, workable, group, last_execution: { hostname, pid, started_at } }) => (
          { _id, class: workable.class, group, on: `${hostname}:${pid}`, for: apart(started_at, at) }));
      },
      waiting() {
        const count = { $group: { _id: { group: "$group", class: "$workable.class" }, jobs: { $sum: 1 }, first: { $min: "$scheduled_at" } } };
        return of("scheduled").aggregate([{ $match: { locked: false } }, count, { $sort: { jobs: -1 } }]).toArray().map(({ _id, ...rest }) => ({ ..._id, ...rest }));
      },
    },
    workers() {
      const at = now();
      return of("roster").find().toArray().map((worker) => ({
        _id: worker._id, on: `${worker.hostname}:${worker.pid}`, alive: isAlive(worker, at), wanted: worker.wanted,
        free: `${number(worker.free)}/${number(worker.capacity)}`, jobs: list(worker.working_on).length,
        seen: worker.last_seen_at && `${apart(worker.last_seen_at, at)} ago`, groups: worker.work_on, classes: list(worker.classes).join(", "),
      }));
    },
    limits() {
      const named = of("limits").find().toArray();
      const groups = of("groups").find({ $or: [{ capacity: { $exists: true } }, { rate: { $exists: true } }] }).toArray();
      const all = [...named, ...groups.map((group) => ({ ...group, _id: `@${group._id}` }))];
      return all.map(({ _id, capacity, rate }) => ({
        _id, capacity: number(capacity), rate: rate && `${rate.starts}/${rate.per_ms} ms`, in_use: _id.endsWith("*") ? undefined : inUse(_id),
      }));
    },
    line(key) {
      const waiting = of("scheduled").find({ gate: `>${key}` }).sort({ created_at: 1, _id: 1 });
      return waiting.toArray().map(({ _id, workable, locked, scheduled_at }) => ({ _id, class: workable.class, locked, scheduled_at }));
    },
  };
})();

//! Jobs that wait for other jobs: order, inputs, failures, continuations, and refusals.

use std::{
    collections::{BTreeMap, BTreeSet},
    sync::Arc,
    time::Duration,
};

use bson::{Document, doc, oid::ObjectId};
use futures_util::TryStreamExt;
use rand::{RngExt as _, SeedableRng as _, rngs::StdRng};
use recruiter_common::{
    Edge, EnqueueError, Graph, GraphId, JobId, JobResult, Keep, NewJob, RetryManyTimes, Unique, Workable,
    control::{Change, Changed, Refusal, Revision},
    graphs::InvalidGraph,
    job::Stage as JobStage,
    shutdown::pause,
    spec::{JobSpec, UnknownPolicies},
    store::Store,
};
use recruiter_tests::{
    diary::Diary,
    fail_points::FailPoint,
    local::{self, Local, connect_args, prepared, store, store_behind_a_proxy},
    mongo::TestDatabase,
    processes::{Process, Setup, System, binary},
    promise,
    proxy::Action,
    wait::{SOON, wait_for, wait_until},
    workable,
    world::Role,
};
use recruiter_worker::{Context, Executable, NotDone, Worker};
use serde::{Deserialize, Serialize};
use serde_json::Value;

use super::cli::recruiter;

/// A job that returns its number plus the numbers of its inputs, or does what its script says.
#[derive(Clone, Serialize, Deserialize)]
struct Step {
    name: String,
    number: i64,
    script: String,
}
workable!(Step -> i64);

impl Executable for Step {
    type State = Diary;

    async fn execute(&self, diary: &Diary, job: &Context) -> Result<i64, NotDone> {
        diary.write(&self.name);
        match self.script.split_once(' ').unwrap_or((&self.script, "")) {
            ("fail", _) => Err(NotDone::give_up("Broken", "as told")),
            ("fail-once", _) if job.retries() == 0 => Err(NotDone::failed("Broken", "once")),
            ("become", depth) => {
                let depth: i64 = depth.parse().unwrap();
                let script = if depth > 1 { format!("become {}", depth - 1) } else { String::new() };
                Err(NotDone::continue_as([step(&format!("{}'", self.name), self.number + 1, &script)]))
            }
            ("split", _) => Err(NotDone::continue_as((0..3).map(|number| step(&format!("{}.{number}", self.name), number, "")))),
            ("itself", _) => Err(NotDone::continue_as([step("x", 1, "").waits_for(job.job_id())])),
            ("named", _) => Err(NotDone::continue_as([step("x", 1, "").with_id(JobId::new())])),
            ("fail-next", _) => Err(NotDone::continue_as([step("next", 1, "fail"), step("good next", 1, "")])),
            ("plain", _) => Ok(self.number),
            ("unique", _) => Err(NotDone::continue_as([step("x", 1, "").unique(Unique::by_key("k"))])),
            ("add", _) => {
                let added = step("added", 5, "").in_graph(job.graph().unwrap()).waits_for(job.job_id());
                added.enqueue(job.client()).await.map_err(|error| NotDone::failed("enqueue", error.to_string()))?;
                Ok(self.number)
            }
            _ => Ok(self.number + job.inputs::<Option<i64>>().await?.iter().flatten().sum::<i64>()),
        }
    }
}

fn step(name: &str, number: i64, script: &str) -> NewJob {
    Step { name: name.into(), number, script: script.into() }.as_job()
}

/// The job that was enqueued again.
fn new_of(changed: &Changed) -> JobId {
    let Changed::EnqueuedAgain { new: Some(new), .. } = changed else { panic!("{changed:?}") };
    *new
}

/// Retries one job alone. Returns the new one.
async fn retry_alone(store: &Store, job: JobId, with: Revision) -> JobId {
    let again = Change::Retry { again: false, with: Box::new(with) };
    new_of(&store.control(false).change(&again, &[job]).await.unwrap()[0].1)
}

struct Stage {
    database: TestDatabase,
    store: Store,
    diary: Arc<Diary>,
    processes: [Local; 2],
}

impl Stage {
    async fn new() -> Self {
        let ((database, store), diary) = (prepared().await, Arc::new(Diary::default()));
        let processes = Local::pair(&database, &[], Worker::new().register::<Step>(diary.clone()).unwrap(), &[]);
        Self { database, store, diary, processes }
    }

    /// The place of a job in the order of executions.
    fn position(&self, name: &str) -> usize {
        let lines = self.diary.lines();
        lines.iter().position(|line| line == name).unwrap_or_else(|| panic!("`{name}` was not executed: {lines:?}"))
    }

    async fn result(&self, job: JobId) -> JobResult<i64> {
        let ended = async || {
            let result = self.store.result_of::<Step>(job).await.unwrap();
            (!matches!(result, JobResult::Unfinished)).then_some(result)
        };
        wait_for(SOON, "the job has ended", ended).await
    }

    async fn archived(&self, job: JobId) -> Document {
        self.result(job).await;
        self.database.raw("archived").find_one(doc! { "_id": job }).await.unwrap().unwrap()
    }

    /// Why the job was archived, with the error class.
    async fn end(&self, job: JobId) -> String {
        let archived = self.archived(job).await;
        let class = archived.get_document("last_execution").and_then(|execution| execution.get_str("class")).unwrap_or_default();
        format!("{} {class}", archived.get_str("why").unwrap()).trim_end().to_owned()
    }

    async fn close(self) {
        assert_eq!(self.database.count("scheduled", doc! {}).await, 0, "nothing is left");
        local::stop(self.processes).await;
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn jobs_run_after_those_that_they_wait_for_with_their_results_as_inputs() {
    let stage = Stage::new().await;
    let mut graph = Graph::new();
    let parts = graph.group((0..5).map(|n| step(&format!("part {n}"), 10_i64.pow(n), "")));
    let sum = graph.when_all(parts.clone(), step("sum", 0, "").keep(Keep::Failures));
    let patient = RetryManyTimes::new(3, Duration::ZERO);
    let stages = graph.pipeline([step("first", 1, "").waits_for(sum), step("second", 1, ""), step("third", 1, "fail-once").retry(patient)]);
    let reduced = graph.map_reduce(1..=3, |n| step(&format!("map {n}"), n, "").waits_for(stages[2]), step("reduce", 0, ""));
    let repeated = graph.clone();
    let enqueued = graph.enqueue(&stage.store).await.unwrap();
    assert!(enqueued.len() == 13 && enqueued.iter().all(|job| job.is_new));
    assert_eq!(stage.result(reduced).await, JobResult::Done(3 * 11_114 + 6));
    assert_eq!(stage.result(sum).await, JobResult::Done(11_111), "it is kept, because a job waits for it");
    for n in 0..5 {
        assert!(stage.position(&format!("part {n}")) < stage.position("sum"));
    }
    let order = ["sum", "first", "second", "third", "reduce"].map(|name| stage.position(name));
    assert!(order.is_sorted(), "{:?}", stage.diary.lines());
    let again = repeated.enqueue(&stage.store).await.unwrap();
    assert!(again.iter().all(|job| !job.is_new), "a repetition enqueues nothing, also when all jobs are archived");
    let last = step("last", 1, "").enqueue(&stage.store).await.unwrap().id;
    assert_eq!(stage.result(last).await, JobResult::Done(1));
    promise!(stage.diary.lines().len() == 15, "each job ran once, and one twice: {:?}", stage.diary.lines());
    stage.close().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_failure_cancels_what_follows_runs_a_fallback_or_is_ignored() {
    let stage = Stage::new().await;
    let mut graph = Graph::new();
    let (good, bad) = (graph.add(step("good", 1, "")), graph.add(step("bad", 1, "fail").keep(Keep::Failures)));
    let next = graph.when_all([good, bad], step("next", 0, ""));
    let after_next = graph.add(step("after next", 0, "").waits_for(next));
    let clean_up = graph.add(step("clean up", 0, "").waits_for_all([Edge::ended(after_next)]));
    let alarm = graph.add(step("alarm", 7, "").waits_for_all([Edge::failed(next)]));
    let all_is_well = graph.add(step("all is well", 0, "").waits_for_all([Edge::failed(good)]));
    let and_so_on = graph.add(step("and so on", 0, "").waits_for_all([Edge::failed(all_is_well)]));
    let id = graph.id();
    graph.enqueue(&stage.store).await.unwrap();
    assert_eq!(stage.end(bad).await, "gave-up Broken");
    assert_eq!(stage.end(next).await, "cancelled parent-failed");
    assert_eq!(stage.end(after_next).await, "cancelled parent-failed");
    assert_eq!(stage.end(clean_up).await, "done");
    assert_eq!(stage.result(alarm).await, JobResult::Done(7));
    assert_eq!(stage.end(all_is_well).await, "cancelled not-needed");
    assert_eq!(stage.end(and_so_on).await, "cancelled not-needed");
    let archived = stage.archived(next).await;
    let message = archived.get_document("last_execution").unwrap().get_str("message").unwrap();
    assert!(message.contains(&bad.to_string()) && message.contains("gave-up"), "{message}");

    // Retried from the failed ones: `bad` fails again, and its followers with it.
    let outcomes: BTreeMap<JobId, Changed> = stage.store.control(false).retry_graph(id).await.unwrap().into_iter().collect();
    assert_eq!(outcomes.keys().copied().collect::<Vec<_>>(), sorted([bad, next, after_next]), "{outcomes:?}");
    let new = |job| new_of(&outcomes[&job]);
    assert_eq!(stage.end(new(next)).await, "cancelled parent-failed");
    assert_eq!(stage.end(new(after_next)).await, "cancelled parent-failed");
    let edges = stage.archived(new(next)).await.get_array("waits_for").unwrap().clone();
    assert_eq!(edges, [good.into(), new(bad).into()], "with edges to the new jobs, and to those that are done");
    let second: Vec<Changed> = stage.store.control(true).retry_graph(id).await.unwrap().into_iter().map(|(_, it)| it).collect();
    assert_eq!(second.len(), 3, "those of the first retry are left alone");
    let jobs = stage.store.graph(id).await.unwrap();
    let retried = jobs.iter().filter(|job| job.retried_as.is_some() && matches!(job.state, JobStage::Failed | JobStage::Cancelled));
    assert_eq!(retried.count(), 3);

    // The parent is retried alone, and succeeds the second time: then its followers are retried, and run.
    let alone = retry_alone(&stage.store, new(bad), Revision::default()).await;
    assert_eq!(stage.end(alone).await, "gave-up Broken");
    let repaired = retry_alone(&stage.store, alone, Revision::default().set(doc! { "script": "" })).await;
    assert_eq!(stage.result(repaired).await, JobResult::Done(1), "it is kept, because jobs wait for it");
    stage.store.control(false).retry_graph(id).await.unwrap();
    let jobs = stage.store.wait_for_graph(id, SOON).await.unwrap();
    let newest = |job: JobId| jobs.iter().find(|other| other.recovered_from == Some(new(job))).unwrap().id;
    assert_eq!(stage.result(newest(next)).await, JobResult::Done(2));
    assert_eq!(stage.end(newest(after_next)).await, "done");
    stage.close().await;
}

fn sorted<const N: usize>(mut jobs: [JobId; N]) -> Vec<JobId> {
    jobs.sort_unstable();
    jobs.to_vec()
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_job_becomes_others_in_one_step_and_its_followers_wait_for_those() {
    let stage = Stage::new().await;
    let mut graph = Graph::new();
    let chain = graph.add(step("chain", 0, "become 20"));
    let split = graph.add(step("split", 0, "split").keep(Keep::Failures));
    let after_chain = graph.add(step("after chain", 1, "").waits_for(chain));
    let after_split = graph.add(step("after split", 0, "").waits_for_all([Edge::ended(split)]));
    let adds = graph.add(step("adds", 0, "add"));
    let id = graph.id();
    graph.enqueue(&stage.store).await.unwrap();
    assert_eq!(stage.result(after_chain).await, JobResult::Done(21), "the input is the result of the last job of the chain");
    assert!(stage.position(&format!("chain{}", "'".repeat(20))) < stage.position("after chain"));
    stage.result(adds).await;
    wait_until(SOON, "the added job runs", async || stage.diary.lines().iter().any(|line| line == "added")).await;
    let JobResult::ContinuedAs(next) = stage.result(chain).await else { panic!("not continued") };
    assert_eq!(next.len(), 1);
    // The inputs of `after split` are an array, and it wants numbers.
    assert_eq!(stage.end(after_split).await, "not-scheduled-by-retry-policy InputError");
    assert!((0..3).all(|n| stage.position(&format!("split.{n}")) < stage.position("after split")));
    let jobs = stage.store.wait_for_graph(id, SOON).await.unwrap();
    assert!(jobs.iter().all(|job| !job.is_open()));
    assert_eq!(jobs.len(), 5 + 20 + 3 + 1, "the new jobs are in the graph");

    // Outside of a graph as well; an invalid continuation is a failure that names the reason.
    let alone = step("alone", 0, "become 1").enqueue(&stage.store).await.unwrap().id;
    let JobResult::ContinuedAs(next) = stage.result(alone).await else { panic!("not continued") };
    assert_eq!(stage.result(next[0]).await, JobResult::Done(1));
    for impossible in ["unique", "itself", "named"] {
        let refused = step("refused", 0, impossible).enqueue(&stage.store).await.unwrap().id;
        assert_eq!(stage.end(refused).await, "gave-up continuation", "{impossible}");
    }

    // The failure of one of the jobs that it became; the repetition follows the jobs as they are now.
    let mut graph = Graph::new();
    let becomes = graph.add(step("becomes", 0, "fail-next"));
    let next = graph.add(step("after", 0, "").waits_for(becomes));
    let alarm = graph.add(step("alarm", 0, "plain").waits_for_all([Edge::failed(becomes)]));
    let id = graph.id();
    graph.enqueue(&stage.store).await.unwrap();
    assert_eq!((stage.end(next).await, stage.end(alarm).await), ("cancelled parent-failed".into(), "done".into()));
    stage.store.wait_for_graph(id, SOON).await.unwrap();
    let JobResult::ContinuedAs(became) = stage.result(becomes).await else { panic!("not continued") };
    let outcomes: BTreeMap<JobId, Changed> = stage.store.control(false).retry_graph(id).await.unwrap().into_iter().collect();
    let new = |job: JobId| new_of(&outcomes[&job]);
    stage.result(new(next)).await;
    let edges = stage.archived(new(next)).await.get_array("waits_for").unwrap().clone();
    assert_eq!(edges, [new(became[0]).into(), became[1].into()], "not to the job that became others");
    stage.close().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 1)]
async fn an_impossible_graph_is_refused_whole() {
    let (database, store) = prepared().await;
    let refused = async |graph: Graph| match graph.enqueue(&store).await {
        Err(EnqueueError::Graph(problem)) => problem,
        other => panic!("{other:?}"),
    };
    let (a, b) = (JobId::new(), JobId::new());
    let mut circle = Graph::new();
    circle.add(step("a", 0, "").with_id(a).waits_for(b));
    circle.add(step("b", 0, "").with_id(b).waits_for(a));
    assert!(matches!(refused(circle).await, InvalidGraph::Cycle { .. }));
    let mut unknown = Graph::new();
    unknown.add(step("a", 0, ""));
    unknown.add(step("b", 0, "").waits_for(a));
    assert_eq!(refused(unknown).await, InvalidGraph::UnknownJob { job: a });
    let mut twice = Graph::new();
    let first = twice.add(step("a", 0, ""));
    twice.add(step("b", 0, "").waits_for_all([Edge::done(first), Edge::failed(first)]));
    assert!(matches!(refused(twice).await, InvalidGraph::TwoEdges { .. }));
    let mut unique = Graph::new();
    unique.add(step("a", 0, "").unique(Unique::by_key("k")));
    assert_eq!(refused(unique).await, InvalidGraph::Unique);
    let mut large = Graph::new();
    large.group((0..20_001).map(|_| step("a", 0, "")));
    assert_eq!(refused(large).await, InvalidGraph::TooManyJobs { jobs: 20_001 });
    let mut line = Graph::new();
    let first = line.add(step("a", 0, ""));
    line.add(step("b", 0, "").in_line("l").waits_for(first));
    assert_eq!(refused(line).await, InvalidGraph::Line);
    assert_eq!(database.count("scheduled", doc! {}).await, 0, "nothing of them is enqueued");
    let fleeting = step("f", 0, "").keep(Keep::Failures).enqueue(&store).await.unwrap().id;
    let mut unseen = Graph::new();
    unseen.add(step("a", 0, "").waits_for(fleeting));
    assert_eq!(refused(unseen).await, InvalidGraph::NotKept { job: fleeting });
    database.raw("scheduled").delete_one(doc! { "_id": fleeting }).await.unwrap();

    let known = step("a", 0, "").with_id(a).enqueue(&store).await.unwrap();
    let mut partly = Graph::new();
    partly.add(step("a", 0, "").with_id(known.id));
    partly.add(step("b", 0, "").waits_for(known.id));
    assert_eq!(refused(partly).await, InvalidGraph::PartlyKnown { job: a });
    assert_eq!(database.count("scheduled", doc! {}).await, 1);

    // By hand: a job that waits is not due, and its edges are checked.
    let mut spec: Document = doc! { "_id": JobId::new(), "locked": false, "group": "g", "priority": 5, "workable": { "class": "c" } };
    spec.insert("scheduled_at", bson::DateTime::now());
    spec.insert("waiting", true);
    assert!(database.raw("scheduled").insert_one(&spec).await.is_err(), "due while it waits");
    spec.insert("scheduled_at", bson::DateTime::from_millis(253_402_300_799_999));
    spec.insert("waits_for", vec![doc! { "job": a, "when": "later" }]);
    assert!(database.raw("scheduled").insert_one(&spec).await.is_err(), "an unknown end");
    spec.insert("waits_for", vec![doc! { "job": a, "when": "failed" }]);
    for (field, value) in [("gate", ">l".into()), ("unique_after", "k".into()), ("continued_as", bson::Bson::Array(vec![a.into()]))] {
        let mut wrong = spec.clone();
        wrong.insert(field, value);
        assert!(database.raw("scheduled").insert_one(&wrong).await.is_err(), "{field}");
    }
    database.raw("scheduled").insert_one(&spec).await.unwrap();
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn finished_running_deleted_and_unannounced_parents() {
    let stage = Stage::new().await;
    let finished = step("finished", 4, "").enqueue(&stage.store).await.unwrap().id;
    stage.result(finished).await;
    let child = step("child", 1, "").waits_for(finished).enqueue(&stage.store).await.unwrap().id;
    assert_eq!(stage.result(child).await, JobResult::Done(5), "a finished job counts");
    // As JSON.
    let spec: JobSpec =
        format!(r#"{{"class": "Step", "parameters": {{"name": "spec", "number": 1, "script": ""}}, "waits_for": ["{child}"]}}"#)
            .parse()
            .unwrap();
    let spec = spec.into_job(UnknownPolicies::Refuse).unwrap().enqueue(&stage.store).await.unwrap().id;
    assert_eq!(stage.result(spec).await, JobResult::Done(6));

    // A job that is inserted by hand and not announced, with a parent that is not marked.
    let parent = step("parent", 2, "").after(Duration::from_secs(3_600)).enqueue(&stage.store).await.unwrap().id;
    let by_hand = JobId::new();
    let parameters = doc! { "name": "by hand", "number": 3_i64, "script": "" };
    let document = doc! {
        "_id": by_hand, "locked": false, "group": "generic", "priority": 5, "workable": { "class": "Step", "parameters": parameters },
        "waits_for": [parent], "waiting": true, "scheduled_at": bson::DateTime::from_millis(253_402_300_799_999),
    };
    stage.database.raw("scheduled").insert_one(document).await.unwrap();
    let waiting = stage.database.raw("scheduled").find_one(doc! { "_id": by_hand }).await.unwrap().unwrap();
    assert!(!waiting.contains_key("followed"));
    let mut control = stage.store.control(false);
    let due_now = Change::Retry { again: false, with: Box::default() };
    let refused = control.change(&due_now, &[by_hand]).await.unwrap();
    assert_eq!(refused, [(by_hand, Changed::Refused(Refusal::WaitsForJobs))], "it is not made due by hand");
    control.change(&due_now, &[parent]).await.unwrap();
    assert_eq!(stage.result(by_hand).await, JobResult::Done(5));

    // A parent that is deleted before its end is seen, and one that is cancelled.
    let later = || step("later", 0, "").after(Duration::from_secs(3_600));
    let [gone, cancelled] = [later().enqueue(&stage.store).await.unwrap().id, later().enqueue(&stage.store).await.unwrap().id];
    let [of_gone, of_cancelled] = [
        step("of gone", 0, "").waits_for(gone).enqueue(&stage.store).await.unwrap().id,
        step("of cancelled", 0, "").waits_for(cancelled).enqueue(&stage.store).await.unwrap().id,
    ];
    stage.database.raw("scheduled").delete_one(doc! { "_id": gone }).await.unwrap();
    assert_eq!(stage.end(of_gone).await, "cancelled parent-gone");
    control.change(&Change::Cancel, &[cancelled]).await.unwrap();
    assert_eq!(stage.end(of_cancelled).await, "cancelled parent-failed");

    // A date that no language can read stops nothing.
    let strange = JobId::new();
    let document = doc! {
        "_id": strange, "locked": false, "group": "generic", "priority": 5, "workable": { "class": "Step", "parameters": doc! { "name": "strange", "number": 3_i64, "script": "" } },
        "waits_for": [], "waiting": true, "scheduled_at": bson::DateTime::from_millis(253_402_300_799_999),
        "due_after": bson::DateTime::from_millis(400_000_000_000_000),
    };
    stage.database.raw("scheduled").insert_one(document).await.unwrap();
    assert_eq!(stage.result(strange).await, JobResult::Done(3));

    // A whole graph.
    let mut graph = Graph::new();
    let root = graph.add(later());
    let child = graph.add(step("never", 0, "").waits_for_all([Edge::failed(root)]));
    let id = graph.id();
    graph.enqueue(&stage.store).await.unwrap();
    control.cancel_graph(id).await.unwrap();
    assert_eq!((stage.end(root).await, stage.end(child).await), ("cancelled cancelled".into(), "cancelled cancelled".into()));
    stage.close().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn the_command_line_enqueues_shows_waits_cancels_and_retries() {
    let stage = Stage::new().await;
    let file = tempfile::NamedTempFile::new().unwrap();
    let job = |name: &str, script: &str, waits_for: &str| {
        format!(
            r#""{name}": {{"class": "Step", "parameters": {{"name": "{name}", "number": 1, "script": "{script}"}}, "waits_for": {waits_for}}}"#
        )
    };
    let text = format!(
        r#"{{"jobs": {{{}, {}, {}}}}}"#,
        job("a", "", "[]"),
        job("b", "fail", r#"["a"]"#),
        job("c", "", r#"["b", {"job": "a", "when": "ended"}]"#)
    );
    std::fs::write(file.path(), text).unwrap();
    let said = recruiter(&stage.database, &["graph", "enqueue", file.path().to_str().unwrap()]);
    let id = said.out.trim().to_owned();
    assert_eq!((said.code, id.len()), (0, 24), "{}", said.err);
    let waited = recruiter(&stage.database, &["graph", "wait", &id, "--timeout", "2m"]);
    assert_eq!(waited.code, 3, "{}{}", waited.out, waited.err);
    assert!(waited.out.starts_with("3 jobs: 1 cancelled, 1 done, 1 failed"), "{}", waited.out);
    let shown = |draw: &[&str]| recruiter(&stage.database, &[&["graph", "show", &id], draw].concat()).out;
    assert!(shown(&[]).contains("gave-up; Broken: as told"), "{}", shown(&[]));
    let by_id = |objects: Vec<Value>| -> BTreeMap<String, String> {
        objects.iter().map(|job| (job["id"].as_str().unwrap().to_owned(), job["state"].as_str().unwrap().to_owned())).collect()
    };
    let (of_graph, of_jobs) = (&["graph", "show", &id, "--json"][..], &["jobs", "list", "--json"][..]);
    let [of_graph, of_jobs] = [of_graph, of_jobs].map(|args| by_id(recruiter(&stage.database, args).objects()));
    assert_eq!(of_graph, of_jobs, "a job has the same state everywhere");
    assert_eq!(of_graph.len(), 3);
    assert!(shown(&["--draw", "dot"]).contains("[label=\"Step\\nfailed\", fillcolor=salmon]"), "{}", shown(&["--draw", "dot"]));
    assert!(shown(&["--draw", "mermaid"]).contains("-- ended -->"));
    assert_eq!(recruiter(&stage.database, &["graph", "cancel", &id]).out, "nothing to cancel: all jobs are finished\n");
    let would = recruiter(&stage.database, &["graph", "retry", &id, "--dry-run"]);
    assert_eq!((would.code, would.out.lines().count()), (0, 2), "{}", would.out);
    assert_eq!(recruiter(&stage.database, &["graph", "retry", &id]).out.lines().count(), 2);
    assert!(shown(&[]).contains("retried as "), "{}", shown(&[]));
    // The driver repeats a read once, and the wait repeats it then.
    let fault = FailPoint::new("recruiter graph", &["find"]).namespace(stage.database.name(), "scheduled").times(3).error_code(189);
    let armed = fault.arm(stage.database.uri()).await;
    let waited = recruiter(&stage.database, &["graph", "wait", &id]);
    assert_eq!((waited.code, armed.struck().await), (3, 3), "{}", waited.err);
    drop(armed);
    let nobodys = "0".repeat(24);
    for (bad, part) in [
        (["graph", "show", "x"], "is not the id of a graph"),
        (["graph", "show", &nobodys], "no job is part of"),
        (["graph", "wait", &nobodys], "no job is part of"),
    ] {
        let said = recruiter(&stage.database, &bad);
        assert!(said.code != 0 && said.err.contains(part), "{}", said.err);
    }
    std::fs::write(file.path(), b"{\"jobs\": {\"a\": {\"class\": \"c\", \"waits_for\": [\"b\"]}}}").unwrap();
    let said = recruiter(&stage.database, &["graph", "enqueue", file.path().to_str().unwrap()]);
    assert!(said.code == 2 && said.err.contains("job \"a\": it waits for \"b\", which is neither"), "{}", said.err);
    stage.close().await;
}

/// Graphs of four layers of four jobs, in which each job waits for all of the layer before it, and each becomes others twice.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn graphs_advance_once_and_in_order_whatever_is_killed() {
    const GRAPHS: usize = 12;
    let (database, store) = prepared().await;
    let recruiter = || Process::on(&database, "recruiter", &[&["run"], Role::Recruiter.quick()].concat());
    let worker = || Process::on(&database, "examples/chain", &[Role::Worker.quick(), &["--concurrency", "8"]].concat());
    let (mut leaders, mut workers) = (vec![recruiter(), recruiter()], vec![worker(), worker()]);
    let cleaner = Process::on(&database, "recruiter-cleaner", Role::Cleaner.quick());
    let retry = RetryManyTimes::new(1_000_000, Duration::ZERO).unwrap();
    let job = || NewJob::of_class("Chain", doc! { "left": 2 }).retry(&retry);
    // In the order of MongoDB: the clocks of the workers only estimate its time.
    let starts = doc! { "ns.coll": "scheduled", "updateDescription.updatedFields.locked": true };
    let wanted = doc! { "$match": { "$or": [starts, { "ns.coll": "archived", "operationType": "insert" }] } };
    let mut changes = database.database().watch().pipeline([wanted]).await.unwrap().with_type::<Document>();
    let mut random = StdRng::seed_from_u64(16);
    for _ in 0..GRAPHS {
        let mut graph = Graph::new();
        let mut layer: Vec<JobId> = Vec::new();
        for _ in 0..4 {
            layer = graph.group((0..4).map(|_| job().waits_for_all(layer.clone())));
        }
        graph.enqueue(&store).await.unwrap();
        pause(Duration::from_millis(random.random_range(0..500))).await;
        let (some, again): (_, &dyn Fn() -> Process) =
            if random.random_bool(0.4) { (&mut leaders, &recruiter) } else { (&mut workers, &worker) };
        let at = random.random_range(0..2);
        some[at].kill();
        some[at].wait_exit(SOON).await;
        some[at] = again();
    }
    wait_until(SOON * 4, "all graphs are done", async || database.count("scheduled", doc! {}).await == 0).await;
    let jobs = database.all("archived", doc! {}).await;
    promise!(jobs.len() == GRAPHS * 16 * 3, "each job became another one twice, and never two: {}", jobs.len());
    assert!(jobs.iter().all(|job| job.get_str("why").unwrap() == "done"));
    let by_id: BTreeMap<JobId, &Document> = jobs.iter().map(|job| (job.get_object_id("_id").unwrap().into(), job)).collect();
    let (mut started, mut ended) = (BTreeMap::new(), BTreeMap::new());
    for at in 0.. {
        if ended.len() == jobs.len() {
            break;
        }
        let change = changes.try_next().await.unwrap().unwrap();
        let job = JobId::from(change.get_document("documentKey").unwrap().get_object_id("_id").unwrap());
        let of = if change.get_str("operationType").unwrap() == "insert" { &mut ended } else { &mut started };
        of.entry(job).or_insert(at);
    }
    let next = |job: &Document| Some(JobId::from(job.get_array("continued_as").ok()?[0].as_object_id()?));
    for (id, job) in &by_id {
        for parent in job.get_array("waits_for").into_iter().flatten() {
            let mut parent = JobId::from(parent.as_object_id().unwrap());
            while let Some(continued) = next(by_id[&parent]) {
                parent = continued;
            }
            assert!(ended[&parent] < started[id], "{parent} ended after {id} was started");
        }
    }
    leaders.iter().chain(&workers).chain([&cleaner]).for_each(Process::terminate);
}

/// The documents of the cancelled jobs are read a few at a time, with any size.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn many_large_jobs_are_cancelled_in_little_memory() {
    // So much is written that the oplog of a shared one would lose what subscribers of other tests have not read.
    let database = TestDatabase::of_its_own().await;
    let store = store(&database).await;
    let parent = JobId::new();
    let recruiter = Process::on(&database, "recruiter", &["run"]);
    step("parent", 1, "").with_id(parent).enqueue(&store).await.unwrap();
    let (graph, count) = (GraphId::new(), 100);
    for _ in 0..count {
        let ballast = doc! { "ballast": "x".repeat(3_900_000) };
        NewJob::of_class("large", ballast).waits_for(parent).in_graph(graph).enqueue(&store).await.unwrap();
    }
    let cancelled = store.control(false).change(&Change::Cancel, &[parent]).await.unwrap();
    assert_eq!(cancelled[0].1, Changed::Cancelled);
    database.until("archived", doc! { "graph": graph, "why": "cancelled" }, count, "all are cancelled").await;
    let status = std::fs::read_to_string(format!("/proc/{}/status", recruiter.pid())).unwrap();
    let most = status.lines().find_map(|line| line.strip_prefix("VmHWM:")).unwrap().trim().trim_end_matches(" kB");
    assert!(most.parse::<u64>().unwrap() < 220_000, "{most} kB");
    drop((recruiter, store, database));
}

/// Two jobs that change with each attempt, and write conflicts: the cancellation tries them again, and leaves none out.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_cancelled_graph_leaves_out_no_job_that_changes_meanwhile() {
    let (database, store) = prepared().await;
    let graph = GraphId::new();
    let parent = step("parent", 1, "").in_graph(graph).enqueue(&store).await.unwrap().id;
    for _ in 0..50 {
        NewJob::of_class("child", doc! {}).in_graph(graph).waits_for(parent).enqueue(&store).await.unwrap();
    }
    let jobs = (0..700).map(|_| NewJob::of_class("other", doc! {}).in_graph(graph));
    store.enqueue_many(jobs).await.unwrap();
    let changing = database.raw("scheduled");
    let end = std::time::Instant::now() + Duration::from_millis(500);
    let changes = tokio::spawn(async move {
        while std::time::Instant::now() < end {
            changing.update_many(doc! { "graph": graph }, doc! { "$inc": { "attempts": 1 } }).await.unwrap();
        }
    });
    let outcomes = store.control(false).cancel_graph(graph).await.unwrap();
    changes.await.unwrap();
    assert!(outcomes.iter().all(|(_, changed)| *changed == Changed::Cancelled), "{outcomes:?}");
    assert_eq!(outcomes.len(), 751);
    assert_eq!(database.count("scheduled", doc! {}).await, 0);
}

/// Those that run are asked to end, and those that wait, of which some start meanwhile, are archived at once.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_cancelled_graph_leaves_out_no_job_that_runs_or_starts() {
    let (database, store) = prepared().await;
    let system = System::start(&database, Setup { workers: 2, worker: &["--builtins", "--concurrency", "1500"], ..Setup::default() });
    let graph = GraphId::new();
    let jobs = (0..3_100).map(|_| NewJob::of_class("sleep", doc! { "ms": 600_000 }).in_graph(graph));
    store.enqueue_many(jobs).await.unwrap();
    let scheduled = database.raw("scheduled");
    let run = async || scheduled.count_documents(doc! { "locked": true }).await.unwrap() == 3_000;
    wait_until(SOON, "3,000 jobs run", run).await;
    let outcomes = store.control(false).cancel_graph(graph).await.unwrap();
    assert!(outcomes.iter().all(|(_, changed)| matches!(changed, Changed::Cancelled | Changed::CancelRequested)), "{outcomes:?}");
    assert_eq!(outcomes.iter().map(|(job, _)| job).collect::<BTreeSet<_>>().len(), 3_100);
    database.until("archived", doc! { "graph": graph, "why": "cancelled" }, 3_100, "all are archived").await;
    system.stop().await;
}

/// 502 jobs are retried in two transactions. The second one fails, as if the process had died between them.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn an_interrupted_retry_keeps_the_graph_open_and_the_next_one_completes_it() {
    let stage = Stage::new().await;
    let mut graph = Graph::new();
    let bad = graph.group((0..501).map(|n| step(&format!("bad {n}"), 1, "fail").keep(Keep::Failures)));
    let last = graph.when_all(bad.clone(), step("last", 0, ""));
    let id = graph.id();
    graph.enqueue(&stage.store).await.unwrap();
    stage.store.wait_for_graph(id, SOON).await.unwrap();
    let archived = stage.database.raw("archived");
    let retried = async || archived.count_documents(doc! { "graph": id, "retried_as": { "$exists": true } }).await.unwrap();
    // "Unauthorized" is not tried again.
    let second = FailPoint::new("test", &["insert"]).namespace(stage.database.name(), "scheduled").skip(1).error_code(13);
    let armed = second.arm(stage.database.uri()).await;
    stage.store.control(false).retry_graph(id).await.unwrap_err();
    assert_eq!((armed.struck().await, retried().await), (1, 500));
    drop(armed);
    let open_jobs = async || {
        let jobs = stage.store.graph(id).await.unwrap();
        jobs.into_iter().filter(|job| job.is_open()).map(|job| (job.id, job.is_retrying)).collect::<Vec<_>>()
    };
    wait_until(SOON, "those of the first portion have failed again", async || open_jobs().await == [(last, true)]).await;
    assert_eq!(archived.count_documents(doc! { "graph": id }).await.unwrap(), 1_002);
    stage.store.wait_for_graph(id, Duration::from_millis(50)).await.unwrap_err();
    // An application may do it in a task of its own.
    let mut control = stage.store.control(false);
    let outcomes = tokio::spawn(async move { control.retry_graph(id).await }).await.unwrap().unwrap();
    assert_eq!(outcomes.len(), 502, "the new 500, and those that were left");
    assert!(outcomes.iter().all(|(_, changed)| matches!(changed, Changed::EnqueuedAgain { new: Some(_), .. })), "{outcomes:?}");
    let jobs = stage.store.wait_for_graph(id, SOON).await.unwrap();
    let by_id: BTreeMap<JobId, _> = jobs.iter().map(|job| (job.id, job)).collect();
    let newest = |mut job: JobId| {
        while let Some(next) = by_id[&job].retried_as {
            job = next;
        }
        job
    };
    let wanted: Vec<JobId> = bad.iter().map(|job| newest(*job)).collect();
    let edges: Vec<JobId> = by_id[&newest(last)].waits_for.iter().map(|edge| edge.job).collect();
    assert_eq!(edges, wanted, "the last one waits for the newest of each");
    assert_eq!(stage.end(newest(last)).await, "cancelled parent-failed");
    assert_eq!(retried().await, 1_002, "each once: 502 jobs, and 500 of the first attempt");
    assert_eq!(jobs.len(), 1_504);

    // Given up instead.
    let armed = FailPoint::new("test", &["insert"]).namespace(stage.database.name(), "scheduled").skip(1).error_code(13);
    let armed = armed.arm(stage.database.uri()).await;
    stage.store.control(false).retry_graph(id).await.unwrap_err();
    drop(armed);
    let mut control = stage.store.control(false);
    tokio::spawn(async move { control.cancel_graph(id).await }).await.unwrap().unwrap();
    stage.store.wait_for_graph(id, SOON).await.unwrap();
    stage.close().await;
}

/// A job that cannot be repeated, and one that another process retries meanwhile: the others are retried, and wait for what there is.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_retry_of_a_graph_follows_what_others_do_meanwhile() {
    let database = TestDatabase::new().await;
    let (proxy, store) = store_behind_a_proxy(&database).await;
    store.prepare_graphs().await.unwrap();
    let (graph, ids) = (GraphId::new(), [(); 4].map(|()| JobId::new()));
    let mut jobs: Vec<Document> = ids.iter().map(|id| failed(graph, *id, &[], "")).collect();
    jobs[2].insert("waits_for", vec![ids[0], ids[1]]);
    jobs[3].insert("waits_for", vec![ids[2]]);
    // It is not a job any more.
    jobs[1].insert("tags", "not a list");
    database.raw("archived").insert_many(&jobs).await.unwrap();
    // Between the read and the write.
    let other = Store::connect(&connect_args(&database), "other").await.unwrap();
    let held = proxy.arm(Action::Hold, 1..=1, |request| request.is("update", "archived"));
    let meanwhile = async {
        held.fired().await;
        retry_alone(&other, ids[0], Revision::default()).await;
        held.release();
    };
    let mut control = store.control(false);
    let (outcomes, ()) = tokio::join!(control.retry_graph(graph), meanwhile);
    let outcomes: BTreeMap<JobId, Changed> = outcomes.unwrap().into_iter().collect();
    assert_eq!(outcomes[&ids[0]], Changed::Refused(Refusal::KeepsChanging));
    assert!(matches!(outcomes[&ids[1]], Changed::Refused(Refusal::Unstorable(_))), "{outcomes:?}");
    let jobs: BTreeMap<JobId, _> = store.graph(graph).await.unwrap().into_iter().map(|job| (job.id, job)).collect();
    let new = |job: JobId| jobs[&job].retried_as.unwrap();
    let edges = |job: JobId| jobs[&new(job)].waits_for.iter().map(|edge| edge.job).collect::<Vec<_>>();
    let of_first = database.raw("archived").find_one(doc! { "_id": ids[0] }).await.unwrap().unwrap();
    let of_first: JobId = of_first.get_object_id("retried_as").unwrap().into();
    assert_eq!(edges(ids[2]), [of_first, ids[1]], "the one that is refused has failed");
    assert_eq!(edges(ids[3]), [new(ids[2])]);
    let followed = doc! { "_id": new(ids[2]), "followed": true };
    assert_eq!(database.count("scheduled", followed).await, 1, "something is left of its success");
    assert!(jobs.values().all(|job| !job.is_retrying));

    // A job ends and another one is retried after the first read of a walk, before that of the archive.
    let (ends, retried) = (new(ids[3]), JobId::new());
    database.raw("archived").insert_one(failed(graph, retried, &[], "")).await.unwrap();
    let held = proxy.arm(Action::Hold, 1..=1, |request| request.is("find", "archived"));
    let meanwhile = async {
        held.fired().await;
        other.control(false).change(&Change::Cancel, &[ends]).await.unwrap();
        other.control(false).retry_graph(graph).await.unwrap();
        held.release();
    };
    let (jobs, ()) = tokio::join!(store.graph(graph), meanwhile);
    let jobs = jobs.unwrap();
    assert!(jobs.iter().any(|job| job.id == ends && job.state == JobStage::Cancelled), "its end is not missed: {jobs:?}");
    assert!(jobs.iter().any(|job| job.recovered_from == Some(retried) && job.is_open()), "the repetition is not missed: {jobs:?}");

    // What a job has become that ended during the read may be in no read: the graph is read again before a wait for it ends.
    let mut graph = Graph::new();
    let only = graph.add(NewJob::of_class("c", doc! {}));
    let id = graph.id();
    graph.enqueue(&store).await.unwrap();
    let held = proxy.arm(Action::Hold, 1..=1, |request| request.is("find", "archived"));
    let meanwhile = async {
        held.fired().await;
        other.control(false).change(&Change::Cancel, &[only]).await.unwrap();
        held.release();
    };
    let (ended, ()) = tokio::join!(store.wait_for_graph(id, SOON), meanwhile);
    assert_eq!((ended.unwrap()[0].state, held.matched()), (JobStage::Cancelled, 2));
}

/// Two of these jobs are a portion.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_retry_in_portions_leaves_to_others_what_they_have_retried() {
    let database = TestDatabase::new().await;
    let (proxy, store) = store_behind_a_proxy(&database).await;
    store.prepare_graphs().await.unwrap();
    let other = Store::connect(&connect_args(&database), "other").await.unwrap();
    let (archived, ballast) = (database.raw("archived"), "x".repeat(3_900_000));
    let hold = |number: u32| proxy.arm(Action::Hold, number..=number, |request| request.is("update", "archived"));

    // After the first portion, one of its jobs has failed again, and another process has retried one of the second portion.
    let (graph, ids) = (GraphId::new(), [(); 5].map(|()| JobId::new()));
    for id in ids {
        let waits_for = if id == ids[4] { &ids[2..3] } else { &[] };
        archived.insert_one(failed(graph, id, waits_for, &ballast)).await.unwrap();
    }
    assert_eq!(store.control(true).retry_graph(graph).await.unwrap().len(), 5);
    assert!(store.graph(graph).await.unwrap().iter().all(|job| !job.is_retrying), "a dry run");
    let held = hold(3);
    let meanwhile = async {
        let enqueued = async || database.raw("scheduled").find_one_and_delete(doc! { "recovered_from": ids[0] }).await.unwrap();
        let new = wait_for(SOON, "the first portion is enqueued", enqueued).await;
        archived.insert_one(failed(graph, new.get_object_id("_id").unwrap().into(), &[], "")).await.unwrap();
        let new = retry_alone(&other, ids[2], Revision::default()).await;
        held.release();
        new
    };
    let mut control = store.control(false);
    let (outcomes, alone) = tokio::join!(control.retry_graph(graph), meanwhile);
    let outcomes: BTreeMap<JobId, Changed> = outcomes.unwrap().into_iter().collect();
    assert_eq!(outcomes.keys().copied().collect::<Vec<_>>(), ids, "not what has failed since: {outcomes:?}");
    let lost: Vec<_> = outcomes.iter().filter(|(_, changed)| !matches!(changed, Changed::EnqueuedAgain { .. })).collect();
    assert_eq!(lost, [(&ids[2], &Changed::Refused(Refusal::KeepsChanging))]);
    let jobs = store.graph(graph).await.unwrap();
    let edges = &jobs.iter().find(|job| job.recovered_from == Some(ids[4])).unwrap().waits_for;
    assert_eq!(edges.iter().map(|edge| edge.job).collect::<Vec<_>>(), [alone]);
    assert!(jobs.iter().all(|job| !job.is_retrying));

    // The job that is to get the note is retried before, and the retry is given up after the note that it makes instead.
    let (graph, ids) = (GraphId::new(), [(); 3].map(|()| JobId::new()));
    archived.insert_many(ids.map(|id| failed(graph, id, &[], &ballast))).await.unwrap();
    let (note, portion) = (hold(1), hold(3));
    let meanwhile = async {
        note.fired().await;
        retry_alone(&other, ids[2], Revision::default()).await;
        note.release();
        portion.fired().await;
        other.control(false).cancel_graph(graph).await.unwrap();
        portion.release();
    };
    let (outcomes, ()) = tokio::join!(control.retry_graph(graph), meanwhile);
    assert_eq!(outcomes.unwrap(), ids.map(|job| (job, Changed::Refused(Refusal::GivenUp))));
}

/// A text in place of an id, as a program of another language may write it.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_job_that_was_retried_by_hand_is_not_retried_again() {
    let (database, store) = prepared().await;
    store.prepare_graphs().await.unwrap();
    let (graph, ids) = (GraphId::new(), [(); 2].map(|()| JobId::new()));
    let mut jobs = ids.map(|id| failed(graph, id, &[], ""));
    jobs[0].extend(doc! { "retried_as": "another", "retrying": { "id": ObjectId::new(), "began_at": bson::DateTime::now() } });
    database.raw("archived").insert_many(&jobs).await.unwrap();
    assert!(store.graph(graph).await.unwrap().iter().all(|job| !job.is_open()));
    let outcomes = store.control(false).retry_graph(graph).await.unwrap();
    assert!(matches!(outcomes[..], [(job, Changed::EnqueuedAgain { .. })] if job == ids[1]), "{outcomes:?}");
}

/// A job that is refused before it is sent, beside one that MongoDB refuses.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_retry_of_a_graph_leaves_out_what_is_refused() {
    let (database, store) = prepared().await;
    store.prepare_graphs().await.unwrap();
    let (graph, ids) = (GraphId::new(), [(); 4].map(|()| JobId::new()));
    let mut jobs = ids.map(|id| failed(graph, id, &[], ""));
    jobs[1].insert("group", "g".repeat(300));
    jobs[3].insert("waits_for", vec![ids[0], ids[1]]);
    // By one that is not retried now.
    jobs[2].insert("followed", true);
    // Of an interrupted retry.
    jobs[1].insert("retrying", doc! { "id": ObjectId::new(), "began_at": bson::DateTime::now() });
    database.raw("archived").insert_many(&jobs).await.unwrap();
    // The batch of three, and its first half.
    let fault = FailPoint::new("test", &["insert"]).namespace(database.name(), "scheduled").times(2).error_code(2);
    let armed = fault.arm(database.uri()).await;
    let outcomes: BTreeMap<JobId, Changed> = store.control(false).retry_graph(graph).await.unwrap().into_iter().collect();
    drop(armed);
    assert!(matches!(outcomes[&ids[0]], Changed::Refused(Refusal::Unstorable(_))), "{outcomes:?}");
    assert!(matches!(outcomes[&ids[1]], Changed::Refused(Refusal::Unstorable(_))), "{outcomes:?}");
    assert!([2, 3].iter().all(|at| matches!(outcomes[&ids[*at]], Changed::EnqueuedAgain { .. })), "{outcomes:?}");
    let jobs = store.graph(graph).await.unwrap();
    assert!(jobs.iter().all(|job| !job.is_retrying));
    let followed = doc! { "recovered_from": ids[2], "followed": true };
    assert_eq!(database.count("scheduled", followed).await, 1);
    let waits = jobs.iter().find(|job| job.recovered_from == Some(ids[3])).unwrap();
    assert_eq!(waits.waits_for.iter().map(|edge| edge.job).collect::<Vec<_>>(), ids[..2]);
}

/// MongoDB refuses one of two jobs, so that each has a transaction of its own, and the second one is interrupted.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_graph_is_open_while_the_halves_of_a_refused_portion_are_retried() {
    let database = TestDatabase::new().await;
    let (proxy, store) = store_behind_a_proxy(&database).await;
    store.prepare_graphs().await.unwrap();
    let (graph, ids) = (GraphId::new(), [(); 2].map(|()| JobId::new()));
    let mut jobs = ids.map(|id| failed(graph, id, &[], ""));
    jobs[0].insert("urn", "taken");
    database.raw("archived").insert_many(&jobs).await.unwrap();
    NewJob::of_class("c", doc! {}).urn("taken").enqueue(&store).await.unwrap();
    let unique = doc! { "key": { "urn": 1 }, "name": "urn", "unique": true, "sparse": true };
    database.database().run_command(doc! { "createIndexes": "scheduled", "indexes": [unique] }).await.unwrap();
    let fault = FailPoint::new("test", &["insert"]).namespace(database.name(), "scheduled").skip(2).error_code(13);
    let armed = fault.arm(database.uri()).await;
    store.control(false).retry_graph(graph).await.unwrap_err();
    drop(armed);
    let open = async || store.graph(graph).await.unwrap().iter().filter(|job| job.is_open()).map(|job| job.id).collect::<Vec<_>>();
    assert_eq!(open().await, [ids[1]]);
    store.control(true).cancel_graph(graph).await.unwrap();
    assert_eq!(open().await, [ids[1]], "a dry run");
    // A portion that comes between the read of a cancellation and the end of the retry is cancelled as well.
    let held = proxy.arm(Action::Hold, 1..=1, |request| request.is("update", "archived"));
    let other = Store::connect(&connect_args(&database), "other").await.unwrap();
    let meanwhile = async {
        held.fired().await;
        let new = NewJob::of_class("c", doc! {}).in_graph(graph).enqueue(&other).await.unwrap().id;
        held.release();
        new
    };
    let mut control = store.control(false);
    let (cancelled, new) = tokio::join!(control.cancel_graph(graph), meanwhile);
    assert_eq!(cancelled.unwrap(), [(new, Changed::Cancelled)]);
    assert!(open().await.is_empty());
}

/// Between the two portions of the retry: a cancellation, and another retry.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_retry_that_runs_is_given_up_by_a_cancellation() {
    for is_cancel in [true, false] {
        let database = TestDatabase::new().await;
        let (proxy, store) = store_behind_a_proxy(&database).await;
        store.prepare_graphs().await.unwrap();
        let (graph, archived) = (GraphId::new(), database.raw("archived"));
        archived.insert_many((0..1_001).map(|_| failed(graph, JobId::new(), &[], ""))).await.unwrap();
        let other = Store::connect(&connect_args(&database), "other").await.unwrap();
        // The note, the first portion, the second one.
        let held = proxy.arm(Action::Hold, 3..=3, |request| request.is("update", "archived"));
        let meanwhile = async {
            held.fired().await;
            let mut control = other.control(false);
            let theirs = if is_cancel { control.cancel_graph(graph).await } else { control.retry_graph(graph).await };
            held.release();
            theirs.unwrap()
        };
        let mut control = store.control(false);
        let (outcomes, theirs) = tokio::join!(control.retry_graph(graph), meanwhile);
        let outcomes = outcomes.unwrap();
        let enqueued =
            |outcomes: &[(JobId, Changed)]| outcomes.iter().filter(|(_, changed)| matches!(changed, Changed::EnqueuedAgain { .. })).count();
        let given_up = outcomes.iter().filter(|(_, changed)| *changed == Changed::Refused(Refusal::GivenUp)).count();
        let jobs = store.graph(graph).await.unwrap();
        assert!(jobs.iter().all(|job| !job.is_retrying));
        if is_cancel {
            assert_eq!((enqueued(&outcomes), given_up), (500, 501));
            assert_eq!(theirs.iter().filter(|(_, changed)| *changed == Changed::Cancelled).count(), 500);
            assert_eq!((jobs.len(), jobs.iter().filter(|job| job.is_open()).count()), (1_501, 0));
        } else {
            assert_eq!((enqueued(&outcomes), enqueued(&theirs), jobs.len()), (500, 501, 2_002), "each once");
        }
        // Of an interrupted one that had nothing more to enqueue.
        if is_cancel {
            let note = doc! { "$set": { "retrying": { "id": ObjectId::new(), "began_at": bson::DateTime::now() } } };
            archived.update_one(doc! { "graph": graph, "retried_as": null }, note).await.unwrap();
            let cancel = recruiter(&database, &["graph", "cancel", &graph.to_string()]);
            assert_eq!(cancel.out, "the rest of its retry is given up; all its jobs are finished\n");
            assert!(store.graph(graph).await.unwrap().iter().all(|job| !job.is_retrying));
        }
    }
}

/// An archived job that has failed.
fn failed(graph: GraphId, id: JobId, waits_for: &[JobId], ballast: &str) -> Document {
    doc! {
        "_id": id, "locked": false, "group": "generic", "priority": 5, "graph": graph, "waits_for": waits_for, "why": "gave-up",
        "workable": { "class": "c", "parameters": { "ballast": ballast } },
        "last_execution": { "class": "Broken", "message": "as told", "ended_at": bson::DateTime::now() },
    }
}

/// 60 large jobs, which wait for each other, and 1,100 small ones. The first process is killed in the middle.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn many_large_jobs_are_retried_in_little_memory_whatever_is_killed() {
    let database = TestDatabase::of_its_own().await;
    database.limit_transactions(2).await;
    let store = store(&database).await;
    store.prepare_graphs().await.unwrap();
    let (graph, archived) = (GraphId::new(), database.raw("archived"));
    let ballast = "x".repeat(3_500_000);
    let large: Vec<JobId> = (0..60).map(|_| JobId::new()).collect();
    for (at, id) in large.iter().enumerate() {
        // The parent has the greater id: the order is not that of the ids.
        archived.insert_one(failed(graph, *id, &large[at + 1..large.len().min(at + 2)], &ballast)).await.unwrap();
    }
    archived.insert_many((0..1_100).map(|_| failed(graph, JobId::new(), &[], ""))).await.unwrap();
    let retried = doc! { "retried_as": { "$exists": true } };
    let id = graph.to_string();
    // The small ones need three transactions, and the large ones come last. The server ends the delay also for a process that is killed.
    let fault = FailPoint::new("recruiter graph", &["insert"]).namespace(database.name(), "scheduled").skip(10);
    let fault = fault.block(Duration::from_secs(60));
    let armed = fault.arm(database.uri()).await;
    let mut first = Process::on(&database, "recruiter", &["graph", "retry", &id]);
    wait_until(SOON, "it is in the middle", async || armed.struck().await > 0).await;
    first.kill();
    first.wait_exit(SOON).await;
    drop(armed);
    assert!((1_101..1_160).contains(&archived.count_documents(retried).await.unwrap()), "it was killed among the large ones");
    assert!(store.graph(graph).await.unwrap().iter().any(|job| job.is_retrying));
    // The second one ends by itself; its memory is read by its parent.
    let measure = "import resource, subprocess, sys
code = subprocess.call(sys.argv[1:], stdout=subprocess.DEVNULL)
print(resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss)
sys.exit(code)";
    let mut second = std::process::Command::new("python3");
    second.args(["-c", measure]).arg(binary("recruiter")).args(["graph", "retry", &id]).env("MONGODB_URI", database.uri());
    let output = tokio::task::spawn_blocking(move || second.output().unwrap()).await.unwrap();
    let said = String::from_utf8_lossy(&output.stderr).into_owned();
    assert!(output.status.success(), "{said}");
    let most: u64 = String::from_utf8(output.stdout).unwrap().trim().parse().unwrap();
    // Much less than the 210 MB of all.
    assert!(most < 150_000, "{most} kB");
    let jobs: BTreeMap<JobId, _> = store.graph(graph).await.unwrap().into_iter().map(|job| (job.id, job)).collect();
    let new = jobs.values().filter(|job| job.recovered_from.is_some());
    let olds: std::collections::BTreeSet<JobId> = new.clone().filter_map(|job| job.recovered_from).collect();
    assert_eq!((new.count(), olds.len(), jobs.len()), (1_160, 1_160, 2_320), "each once");
    for job in jobs.values().filter(|job| job.recovered_from.is_none()) {
        let edges = |job: JobId| jobs[&job].waits_for.iter().map(|edge| edge.job).collect::<Vec<_>>();
        let wanted: Vec<JobId> = job.waits_for.iter().map(|edge| jobs[&edge.job].retried_as.unwrap()).collect();
        assert_eq!(edges(job.retried_as.unwrap()), wanted);
    }
    assert!(jobs.values().all(|job| !job.is_retrying), "the retry is complete");
    drop((first, store, database));
}

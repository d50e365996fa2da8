//! Random bad days, from a seed: workers and recruiters are stopped, killed, frozen and started again while jobs of every
//! kind come in. Afterwards every execution is accounted for.

use std::{collections::HashMap, time::Duration};

use bson::{Document, doc};
use futures_util::TryStreamExt;
use rand::{RngExt, SeedableRng, rngs::StdRng};
use recruiter_common::{enqueue::NewJob, ids::JobId, retry_policy::RetryManyTimes, shutdown::pause};
use recruiter_tests::{
    local::store,
    mongo::TestDatabase,
    processes::{Process, System},
    wait::wait_until,
};

const ACTIONS: usize = 60;
const RETRIES: u32 = 20;

fn number(document: &Document, field: &str) -> i64 {
    document.get(field).and_then(|n| n.as_i64().or(n.as_i32().map(i64::from))).unwrap_or(0)
}

#[tokio::test]
async fn after_random_kills_and_stops_every_execution_is_accounted_for() {
    let seed = std::env::var("RECRUITER_ENDURANCE_SEED").map_or_else(|_| rand::random(), |seed| seed.parse().expect("a number"));
    println!("RECRUITER_ENDURANCE_SEED={seed}");
    let mut random = StdRng::seed_from_u64(seed);
    let database = TestDatabase::new().await;
    let directory = tempfile::tempdir().unwrap();
    let (config, log) = (directory.path().join("workables.toml"), directory.path().join("entered"));
    let script = format!("echo $RECRUITER_JOB_ID >> {}; sleep {{seconds}}", log.display());
    std::fs::write(&config, format!("[workables.once]\ncommand = [\"sh\", \"-c\", \"{script}\"]\n")).unwrap();
    let config = config.display().to_string();
    let worker = || {
        Process::on(
            &database,
            "recruiter-worker",
            &["--builtins", "--config", &config, "--grace", "1s", "--heartbeat", "500ms", "--lease", "2s"],
        )
    };
    let recruiter = || Process::on(&database, "recruiter", &["run", "--lease", "3s"]);
    let mut system = System {
        recruiter: recruiter(),
        cleaner: Process::on(&database, "recruiter-cleaner", &["--dead-after", "3s", "--every", "200ms", "--sweep-every", "1s"]),
        workers: (0..3).map(|_| worker()).collect(),
    };
    let store = store(&database).await;
    let again = RetryManyTimes::new(RETRIES, Duration::from_millis(50)).unwrap();
    let mut jobs: HashMap<JobId, bool> = HashMap::new();
    for _ in 0..ACTIONS {
        match random.random_range(0..100) {
            0..60 => {
                let repeatable: bool = random.random();
                let group = if random.random_bool(0.3) { "fast-lane" } else { "generic" };
                let job = if repeatable {
                    NewJob::of_class("sleep", doc! { "ms": random.random_range(0..400) }).retry(&again)
                } else {
                    NewJob::of_class("once", doc! { "seconds": f64::from(random.random_range(0..40)) / 100.0 })
                };
                let count = random.random_range(1..30);
                let ids = store.enqueue_many(std::iter::repeat_n(job.in_group(group), count)).await.unwrap();
                jobs.extend(ids.into_iter().map(|id| (id, repeatable)));
            }
            60..78 => {
                let index = random.random_range(0..system.workers.len());
                let mut gone = std::mem::replace(&mut system.workers[index], worker());
                if random.random() {
                    gone.kill();
                } else {
                    gone.terminate();
                }
                gone.wait_exit(Duration::from_secs(20)).await;
            }
            78..86 => {
                let index = random.random_range(0..system.workers.len());
                system.workers[index].pause();
                pause(Duration::from_millis(random.random_range(100..5_000))).await;
                system.workers[index].resume();
            }
            86..93 => {
                let gone = std::mem::replace(&mut system.recruiter, recruiter());
                if random.random() {
                    gone.kill();
                } else {
                    gone.terminate();
                }
            }
            _ => pause(Duration::from_millis(random.random_range(1..1_000))).await,
        }
    }
    let all = jobs.len() as u64;
    let count = async |collection: &str| database.raw(collection).count_documents(doc! {}).await.unwrap();
    wait_until(Duration::from_secs(90), "everything is archived", async || count("archived").await == all).await;
    assert_eq!(count("scheduled").await, 0);

    let entered = std::fs::read_to_string(&log).unwrap_or_default();
    let mut entries: HashMap<&str, u32> = HashMap::new();
    entered.lines().for_each(|id| *entries.entry(id).or_default() += 1);
    let archived: Vec<Document> = database.raw("archived").find(doc! {}).await.unwrap().try_collect().await.unwrap();
    for job in &archived {
        let id: JobId = job.get_object_id("_id").unwrap().into();
        let (why, attempts, interruptions) = (job.get_str("why").unwrap(), number(job, "attempts"), number(job, "interruptions"));
        let executions = job.get_array("executions").cloned().unwrap_or_default();
        // Handed back before they were entered: interruptions without an entry in the history.
        let recorded = i64::try_from(executions.len()).unwrap() + number(job, "executions_dropped");
        assert!(attempts > recorded && attempts - 1 - recorded <= interruptions, "I4: {job}");
        assert!(attempts - interruptions <= i64::from(RETRIES) + 1, "I6: {job}");
        if jobs[&id] {
            assert_eq!(why, "done", "{job}");
        } else {
            assert!(["done", "worker-died", "interrupted"].contains(&why), "{job}");
            let times = entries.get(id.to_string().as_str()).copied().unwrap_or(0);
            assert!(times <= 1, "I5: entered {times} times: {job}");
            assert!(why != "done" || times == 1, "done, but never entered: {job}");
        }
    }
    system.stop().await;
    let left = database.raw("roster").count_documents(doc! {}).await.unwrap();
    assert_eq!(left, 0, "I8: who stops leaves the roster");
}

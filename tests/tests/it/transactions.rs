//! Transactions in which workables end their own jobs: the effects happen once for each job that is done, whatever dies.

use std::{collections::HashMap, env, time::Duration};

use bson::{Document, doc};
use futures_util::TryStreamExt;
use mongodb::Collection;
use rand::{RngExt as _, SeedableRng as _, rngs::StdRng};
use recruiter_common::{JobId, JobResult, NewJob, RetryManyTimes, Store, Workable, enqueue::EnqueueError, ids::WorkerId, shutdown::pause};
use recruiter_tests::{
    local::{Local, store},
    mongo::TestDatabase,
    oracle::number,
    processes::Process,
    wait::wait_until,
    world::{FROZEN_FOR, Role},
};
use recruiter_worker::{CheckpointError, Context, Executable, NotDone, Worker};
use serde::{Deserialize, Serialize};

const SOON: Duration = Duration::from_secs(30);
const ACCOUNTS: i32 = 8;
/// Kills and freezes, unless the environment says otherwise.
const BLOWS: usize = 30;
const TELLERS: usize = 3;

fn teller(database: &TestDatabase) -> Process {
    Process::on(database, "teller", &[Role::Worker.quick(), &["--concurrency", "6"]].concat())
}

async fn enqueue_transfers(store: &Store, count: usize, random: &mut StdRng) -> Result<Vec<JobId>, EnqueueError> {
    let retry = RetryManyTimes::new(1_000_000, Duration::ZERO).expect("valid");
    let jobs: Vec<NewJob> = (0..count)
        .map(|_| {
            let [from, to] = [random.random_range(0..ACCOUNTS), random.random_range(0..ACCOUNTS)];
            NewJob::of_class("Transfer", doc! { "from": from, "to": to, "ms": random.random_range(0..8_i64) }).retry(&retry)
        })
        .collect();
    Ok(store.enqueue_many(jobs).await?.into_iter().map(|job| job.id).collect())
}

/// `RECRUITER_TEST_BLOWS` sets the number of kills and freezes for a longer run.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn effects_happen_once_for_each_job_whatever_is_killed_or_frozen() {
    let blows = env::var("RECRUITER_TEST_BLOWS").ok().and_then(|count| count.parse().ok()).unwrap_or(BLOWS);
    let mut random = StdRng::seed_from_u64(blows as u64);
    let database = TestDatabase::new().await;
    let store = store(&database).await;
    let accounts = database.raw("accounts");
    accounts.insert_many((0..ACCOUNTS).map(|account| doc! { "_id": account, "cents": 1_000_000 })).await.unwrap();
    database.raw("effects").insert_one(doc! { "job": "none" }).await.unwrap();
    let mut recruiter = Process::on(&database, "recruiter", &[&["run"], Role::Recruiter.quick()].concat());
    let mut cleaner = Process::on(&database, "recruiter-cleaner", Role::Cleaner.quick());
    let mut tellers: Vec<Process> = (0..TELLERS).map(|_| teller(&database)).collect();
    let mut jobs = Vec::new();
    let mut frozen: Vec<(std::time::Instant, Process)> = Vec::new();
    for _ in 0..blows {
        let open = database.raw("scheduled").count_documents(doc! { "workable.class": "Transfer" }).await.unwrap();
        if open < 200 {
            jobs.extend(enqueue_transfers(&store, 300, &mut random).await.unwrap());
        }
        pause(Duration::from_millis(random.random_range(0..400))).await;
        let at = random.random_range(0..tellers.len());
        if random.random_bool(0.25) && frozen.len() < 4 {
            // It wakes up after it was declared dead, in the middle of its transactions.
            let zombie = std::mem::replace(&mut tellers[at], teller(&database));
            zombie.pause();
            frozen.push((std::time::Instant::now(), zombie));
        } else {
            let mut dead = std::mem::replace(&mut tellers[at], teller(&database));
            dead.kill();
            dead.wait_exit(SOON).await;
        }
        for (since, zombie) in &mut frozen {
            if since.elapsed() > FROZEN_FOR && zombie.is_stopped() {
                zombie.resume();
            }
        }
        while frozen.len() >= 4 {
            let (_, mut zombie) = frozen.remove(0);
            zombie.resume();
            pause(Duration::from_millis(200)).await;
            zombie.kill();
            zombie.wait_exit(SOON).await;
        }
        if random.random_bool(0.05) {
            recruiter.kill();
            recruiter.wait_exit(SOON).await;
            recruiter = Process::on(&database, "recruiter", &[&["run"], Role::Recruiter.quick()].concat());
        }
        if random.random_bool(0.05) {
            cleaner.kill();
            cleaner.wait_exit(SOON).await;
            cleaner = Process::on(&database, "recruiter-cleaner", Role::Cleaner.quick());
        }
    }
    frozen.iter().for_each(|(_, zombie)| zombie.resume());
    wait_until(SOON * 6, "all jobs have ended", async || database.raw("scheduled").count_documents(doc! {}).await.unwrap() == 0).await;
    pause(Duration::from_millis(500)).await;

    let archived: Vec<Document> =
        database.raw("archived").find(doc! { "workable.class": "Transfer" }).await.unwrap().try_collect().await.unwrap();
    assert_eq!(
        (archived.len(), archived.iter().filter(|job| job.get_str("why").is_ok_and(|why| why == "done")).count()),
        (jobs.len(), jobs.len())
    );
    let effects: Vec<Document> =
        database.raw("effects").find(doc! { "job": { "$type": "objectId" } }).await.unwrap().try_collect().await.unwrap();
    let mut of_job: HashMap<JobId, Vec<String>> = HashMap::new();
    for effect in &effects {
        of_job.entry(effect.get_object_id("job").unwrap().into()).or_default().push(effect.get_str("start").unwrap().to_owned());
    }
    for job in &archived {
        let id = JobId::from(job.get_object_id("_id").unwrap());
        let start = job.get_document("last_execution").unwrap().get_object_id("start").unwrap().to_hex();
        assert_eq!(of_job.get(&id), Some(&vec![start.clone()]), "one effect, of the start that ended the job {id}");
        assert_eq!(job.get_str("result").unwrap(), format!("moved by {start}"));
    }
    assert_eq!(effects.len(), jobs.len());
    assert_eq!(database.raw("archived").count_documents(doc! { "workable.class": "Receipt" }).await.unwrap(), jobs.len() as u64);
    let balances: Vec<Document> = accounts.find(doc! {}).await.unwrap().try_collect().await.unwrap();
    let sum: i64 = balances.iter().map(|account| number(account, "cents")).sum();
    assert_eq!(sum, i64::from(ACCOUNTS) * 1_000_000);
    let repeated = archived.iter().filter(|job| number(job, "attempts") > 1).count();
    assert!(repeated > 0, "some blows struck a transaction");
    eprintln!("{} jobs, {} effects, {blows} kills and freezes, {repeated} jobs started more than once", jobs.len(), effects.len());
    for (_, mut zombie) in frozen {
        zombie.kill();
        zombie.wait_exit(SOON).await;
    }
    tellers.into_iter().chain([recruiter, cleaner]).for_each(|process| process.terminate());
}

#[expect(clippy::disallowed_methods, reason = "a collection of the application")]
fn collection(job: &Context, name: &str) -> Collection<Document> {
    job.store().database().collection(name)
}

/// Does in a transaction what its script says.
#[derive(Serialize, Deserialize)]
struct Note {
    script: String,
}

impl Workable for Note {
    const CLASS: &'static str = "Note";
    type Output = String;
}

impl Executable for Note {
    type State = ();

    async fn execute(&self, (): &(), job: &Context) -> Result<String, NotDone> {
        let [notes, conflicts, scheduled] = &["notes", "conflicts", "scheduled"].map(|name| collection(job, name));
        let result = job
            .transaction(|mut session| async move {
                notes.insert_one(doc! { "job": job.job_id() }).session(&mut *session).await?;
                match self.script.as_str() {
                    "fail" => return Err(NotDone::failed("Broken", "as told").into()),
                    "error" => Err("a text")?,
                    "conflict" => {
                        // Another writer is faster, once.
                        let done = conflicts.count_documents(doc! {}).await?;
                        if done == 0 {
                            conflicts.insert_one(doc! { "_id": 1 }).await?;
                        }
                        conflicts.update_one(doc! { "_id": 1 }, doc! { "$inc": { "n": 1 } }).session(&mut *session).await?;
                    }
                    "wrapped conflict" => {
                        // The same, and the error's type is lost on its way.
                        if conflicts.count_documents(doc! { "_id": 2 }).await? == 0 {
                            conflicts.insert_one(doc! { "_id": 2 }).await?;
                        }
                        let updated = conflicts.update_one(doc! { "_id": 2 }, doc! { "$inc": { "n": 1 } }).session(&mut *session).await;
                        updated.map_err(|error| error.to_string())?;
                    }
                    "reports" => {
                        // Each second of it would be a write to the document of the job.
                        conflicts.insert_one(doc! { "body of": job.job_id() }).await?;
                        for step in 1..=20 {
                            job.progress((step, 20));
                            job.checkpoint(step)?;
                            job.log(format!("step {step}"));
                            pause(Duration::from_millis(100)).await;
                        }
                        assert_eq!(job.save_checkpoint(21).await, Err(CheckpointError::InTransaction));
                    }
                    "commits" => session.commit_transaction().await?,
                    "dead" => {
                        // What a rescue does after the death of the worker.
                        let unlock = doc! { "$set": { "last_execution.start": WorkerId::new() } };
                        scheduled.update_one(doc! { "_id": job.job_id() }, unlock).await?;
                    }
                    _ => {}
                }
                Ok(self.script.clone())
            })
            .await?;
        match self.script.as_str() {
            "fail afterwards" => Err(NotDone::failed("Broken", "afterwards")),
            "panic afterwards" => panic!("afterwards"),
            "twice" => job.transaction(|_session| async move { Ok("twice".to_owned()) }).await,
            _ => Ok(result),
        }
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_transaction_is_all_or_nothing_and_the_job_ends_with_it() {
    let database = TestDatabase::new().await;
    let store = store(&database).await;
    database.raw("notes").insert_one(doc! { "job": "none" }).await.unwrap();
    let recruiter = Local::recruiter(&database, &[]);
    let worker = Local::worker(&database, Worker::new().register::<Note>(()).unwrap(), &[]);
    let run = async |script: &str| {
        let id = Note { script: script.into() }.as_job().enqueue(&store).await.unwrap().id;
        let ended = async || !matches!(store.result_of::<Note>(id).await.unwrap(), JobResult::Unfinished);
        wait_until(SOON, "the job has ended", ended).await;
        let result = store.result_of::<Note>(id).await.unwrap();
        let end = if let JobResult::Failed { failure: Some(failure), .. } = &result {
            format!("{} {}", failure.class, failure.message)
        } else {
            format!("done {}", result.done().unwrap())
        };
        (end, database.raw("notes").count_documents(doc! { "job": id }).await.unwrap())
    };
    assert_eq!(run("plain").await, ("done plain".into(), 1));
    assert_eq!(run("fail").await, ("Broken as told".into(), 0));
    assert_eq!(run("error").await, ("error a text".into(), 0));
    assert_eq!(run("fail afterwards").await, ("done fail afterwards".into(), 1), "the commit was its end");
    assert_eq!(run("panic afterwards").await, ("done panic afterwards".into(), 1));
    assert_eq!(run("twice").await, ("done twice".into(), 1));
    assert_eq!(run("conflict").await, ("done conflict".into(), 1), "it is repeated");
    assert_eq!(run("wrapped conflict").await, ("done wrapped conflict".into(), 1), "it is repeated as well");
    assert_eq!(run("reports").await, ("done reports".into(), 1));
    let bodies = database.raw("conflicts").count_documents(doc! { "body of": { "$exists": true } }).await.unwrap();
    assert_eq!(bodies, 1, "it commits at the first attempt");
    let reported = database.raw("archived").find_one(doc! { "result": "reports" }).await.unwrap().unwrap();
    assert_eq!(number(reported.get_document("progress").unwrap(), "done"), 20);
    assert_eq!((reported.get_array("log").unwrap().len(), reported.get("checkpoint")), (20, None));
    assert!(run("commits").await.0.starts_with("transaction the body has ended the transaction itself"));

    let id = Note { script: "dead".into() }.as_job().enqueue(&store).await.unwrap().id;
    let stolen = doc! { "_id": id, "locked": true, "attempts": 1 };
    wait_until(SOON, "the claim is lost", async || database.raw("scheduled").count_documents(stolen.clone()).await.unwrap() == 1).await;
    pause(Duration::from_millis(500)).await;
    assert_eq!(database.raw("notes").count_documents(doc! { "job": id }).await.unwrap(), 0, "a zombie has no effect");
    assert_eq!(database.raw("archived").count_documents(doc! { "_id": id }).await.unwrap(), 0);

    let items = NewJob::bundle([Note { script: "plain".into() }]).enqueue(&store).await.unwrap().id;
    let archived = async || database.raw("archived").find_one(doc! { "_id": items }).await.unwrap();
    wait_until(SOON, "the bundle has ended", async || archived().await.is_some()).await;
    let outcomes = archived().await.unwrap().get_array("item_outcomes").unwrap().clone();
    assert_eq!(outcomes[0].as_document().unwrap().get_str("class").unwrap(), "transaction", "an item has no transaction of its own");
    worker.stop().await;
    recruiter.stop().await;
}

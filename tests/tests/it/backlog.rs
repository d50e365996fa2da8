//! Backlog caps: a group with as many waiting jobs as it may have accepts no further ones.

use std::time::{Duration, Instant as Monotonic};

use bson::doc;
use futures_util::future::join_all;
use mongodb::ClientSession;
use recruiter_common::{EnqueueError, NewJob, WorkerId, limits::SettingError, shutdown::pause, store::Store};
use recruiter_tests::{
    factory::{minimal_job, started},
    local::{ids, prepared, store},
    mongo::TestDatabase,
    processes::{Setup, System},
    steps::step,
    wait::{SOON, Stopwatch, best_of_three, wait_until},
};
use serde_json::json;
use tokio::time::timeout;

use super::cli::recruiter;

fn jobs(count: usize) -> impl Iterator<Item = NewJob> {
    (0..count).map(|_| NewJob::of_class("noop", doc! {}))
}

async fn is_full(store: &Store, count: usize) -> bool {
    match store.enqueue_many(jobs(count)).await {
        Ok(_) => false,
        Err(EnqueueError::BacklogFull { group, .. }) => group == "generic",
        Err(error) => panic!("{error}"),
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 1)]
async fn a_full_group_accepts_no_job_until_one_has_started() {
    let (database, store) = prepared().await;
    store.groups().set_most_waiting("generic", Some(10)).await.unwrap();
    assert!(is_full(&store, 11).await, "more than there can ever be");
    assert!(!is_full(&store, 8).await && is_full(&store, 3).await && !is_full(&store, 2).await && is_full(&store, 1).await);
    assert_eq!(database.count("scheduled", doc! {}).await, 10);
    assert!(store.enqueue_many(jobs(5).map(|job| job.in_group("other"))).await.is_ok());
    assert!(store.enqueue_many(jobs(5).map(|job| job.in_group("other")).chain(jobs(1))).await.is_err());
    // Jobs of a lane of their own wait as well.
    let mut gated = minimal_job("noop");
    gated.insert("gate", "g");
    database.raw("scheduled").insert_one(gated).await.unwrap();
    assert_eq!(store.waiting_in("generic", 100).await.unwrap(), 11);
    assert_eq!(store.waiting_in("generic", 5).await.unwrap(), 5);
    database.raw("scheduled").delete_one(doc! { "gate": "g" }).await.unwrap();
    // In a transaction of the caller.
    let enqueue = async |session: &mut ClientSession| Ok(jobs(1).next().unwrap().enqueue_in(&store, session).await?);
    let refused = store.start_session().await.unwrap().start_transaction().and_run2(enqueue).await.unwrap_err();
    assert!(matches!(refused.get_custom::<EnqueueError>(), Some(EnqueueError::BacklogFull { most_waiting: 10, .. })), "{refused}");
    let id = only_one(&database, doc! { "group": "generic" }).await;
    assert_eq!(started(&store, WorkerId::new(), &[id]).await.len(), 1);
    pause(Duration::from_millis(100)).await;
    assert!(!is_full(&store, 1).await && is_full(&store, 1).await);
    store.groups().set_most_waiting("generic", None).await.unwrap();
    assert!(!is_full(&store, 100).await);
}

/// Each key by itself, across all groups; the lowest cap of several resources.
#[tokio::test(flavor = "multi_thread", worker_threads = 1)]
async fn as_many_jobs_wait_for_a_key_as_its_limit_allows() {
    let (database, store) = prepared().await;
    let job =
        |limits: &[&str], group: &str| limits.iter().fold(NewJob::of_class("noop", doc! {}), |job, name| job.limit(*name)).in_group(group);
    let set = |name: &str, most: &str| recruiter(&database, &["limits", "set", name, "--capacity", "1", "--most-waiting", most]);
    assert!(set("customer:*", "3").out.contains("at most 3 jobs may wait"));
    assert_eq!(set("printer", "2").code, 0);
    let enqueue = async |limits: &[&str], group: &str, count: usize| match store.enqueue_many(vec![job(limits, group); count]).await {
        Ok(_) => String::new(),
        Err(EnqueueError::GateFull { limit, most_waiting, .. }) => format!("{limit} {most_waiting}"),
        Err(error) => panic!("{error}"),
    };
    assert_eq!(enqueue(&["customer:1"], "a", 4).await, "customer:* 3");
    assert_eq!(enqueue(&["customer:1"], "a", 2).await, "");
    assert_eq!(enqueue(&["customer:1"], "b", 2).await, "customer:* 3", "the group does not matter");
    assert_eq!(enqueue(&["customer:1"], "b", 1).await, "");
    assert_eq!(enqueue(&["customer:2"], "a", 3).await, "", "another key");
    assert_eq!(enqueue(&["customer:1", "printer"], "a", 3).await, "printer 2");
    assert_eq!(enqueue(&["customer:1", "printer"], "a", 2).await, "");
    assert_eq!(store.waiting_at("customer:1", 100).await.unwrap(), 3);
    assert_eq!(store.waiting_at("customer:1", 2).await.unwrap(), 2);
    let listed: Vec<String> = recruiter(&database, &["limits", "list"]).out.lines().map(str::to_owned).collect();
    assert!(listed.iter().any(|line| line.starts_with("customer:*") && line.trim_end().ends_with('3')), "{listed:?}");
    assert!(recruiter(&database, &["limits", "show", "printer", "--json"]).out.contains(r#""most_waiting":2"#));
    // A start makes room, and a caller may wait for that.
    let waiting = store.enqueue_when_room([job(&["customer:1"], "a")], SOON);
    let start = async {
        pause(Duration::from_millis(200)).await;
        let id = only_one(&database, doc! { "gate": "customer:1" }).await;
        started(&store, WorkerId::new(), &[id]).await.len()
    };
    let (waited, started) = tokio::join!(waiting, start);
    assert_eq!((waited.unwrap().len(), started), (1, 1));
    let together = timeout(SOON, store.enqueue_when_room(vec![job(&["printer"], "a"); 3], SOON * 10)).await;
    assert!(matches!(together.expect("there can never be room"), Err(EnqueueError::GateFull { .. })));
    // Without the setting there is no cap.
    assert_eq!(recruiter(&database, &["limits", "set", "customer:*", "--capacity", "1"]).code, 0);
    pause(Duration::from_millis(1_200)).await;
    assert_eq!(enqueue(&["customer:1"], "a", 9).await, "");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 1)]
async fn wrong_caps_of_resources_are_refused_with_the_reason() {
    let (database, store) = prepared().await;
    for (args, said) in [
        (["limits", "set", "@mail", "--capacity", "1", "--most-waiting", "5"], "recruiter groups set"),
        (["limits", "set", "printer", "--capacity", "1", "--most-waiting", "0"], "--most-waiting"),
        (["limits", "set", "printer", "--capacity", "1", "--most-waiting", "9999999999"], "--most-waiting"),
    ] {
        let said_it = recruiter(&database, &args);
        assert!(said_it.code == 2 && said_it.err.contains(said), "{args:?}: {}", said_it.err);
    }
    for (name, most, said) in [("scanner", 5, "has no limit"), ("@mail", 5, "recruiter groups set"), ("a,b", 5, "must not contain")] {
        let problem = store.limits().set_most_waiting(name, Some(most)).await.unwrap_err().to_string();
        assert!(problem.contains(said), "{problem}");
    }
    let wrong = doc! { "_id": "plotter", "capacity": 1, "most_waiting": "many" };
    assert!(database.raw("limits").insert_one(wrong).await.is_err());
}

async fn only_one(database: &TestDatabase, filter: bson::Document) -> recruiter_common::JobId {
    database.raw("scheduled").find_one(filter).await.unwrap().unwrap().get_object_id("_id").unwrap().into()
}

#[tokio::test(flavor = "multi_thread", worker_threads = 1)]
async fn another_process_notices_a_cap_within_about_a_second() {
    let noticed = async || {
        let database = TestDatabase::new().await;
        let (store, other) = (store(&database).await, store(&database).await);
        assert!(!is_full(&other, 5).await);
        store.groups().set_most_waiting("generic", Some(5)).await.unwrap();
        let began = Stopwatch::start();
        wait_until(SOON, "the cap is noticed", async || is_full(&other, 1).await).await;
        began.elapsed()
    };
    best_of_three(Duration::from_secs(5), "noticing a cap", noticed).await;
}

/// At the same time, from several processes: by no more than what they count at the same time.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_cap_is_approximate_and_by_how_much() {
    let database = TestDatabase::new().await;
    let mut stores = Vec::new();
    for _ in 0..4 {
        stores.push(store(&database).await);
    }
    stores[0].groups().set_most_waiting("generic", Some(500)).await.unwrap();
    let (mut all, mut full) = (0, 0);
    // In step, because a caller that stands still for a moment uses later what an earlier count has granted.
    while full < stores.len() {
        full = join_all(stores.iter().map(|store| is_full(store, 1))).await.into_iter().filter(|full| *full).count();
        all += stores.len() - full;
    }
    // Four callers, one job each.
    assert!((500..=504).contains(&all), "{all}");
    assert_eq!(database.count("scheduled", doc! {}).await, u64::try_from(all).unwrap());
}

#[tokio::test(flavor = "multi_thread", worker_threads = 1)]
async fn a_caller_can_wait_for_room() {
    let (database, store) = prepared().await;
    store.groups().set_most_waiting("generic", Some(3)).await.unwrap();
    let first = ids(store.enqueue_when_room(jobs(3), Duration::ZERO).await.unwrap());
    let began = Monotonic::now();
    let full = store.enqueue_when_room(jobs(1), Duration::from_millis(300)).await;
    assert!(matches!(full, Err(EnqueueError::BacklogFull { .. })));
    assert!(began.elapsed() >= Duration::from_millis(300));
    let never = timeout(SOON, store.enqueue_when_room(jobs(4), SOON * 10)).await;
    assert!(matches!(never.expect("it would wait in vain"), Err(EnqueueError::BacklogFull { .. })));
    let waiting = {
        let store = store.clone();
        tokio::spawn(async move { store.enqueue_when_room(jobs(1), SOON).await.map(ids) })
    };
    pause(Duration::from_millis(200)).await;
    assert_eq!(started(&store, WorkerId::new(), &first[..1]).await.len(), 1);
    assert_eq!(waiting.await.unwrap().unwrap().len(), 1);
    // A file of more jobs than may wait, while workers run them.
    let system = System::start(&database, Setup::default());
    let lines = "{\"class\": \"noop\"}\n".repeat(20);
    let mut child = super::cli::spawn(&database, &["enqueue", "--from", "-", "--wait-for-room", "2m", "--json"]);
    std::io::Write::write_all(&mut child.stdin.take().unwrap(), lines.as_bytes()).unwrap();
    let said = tokio::task::spawn_blocking(move || super::cli::Said::of(child.wait_with_output().unwrap())).await.unwrap();
    assert_eq!(said.objects().last().unwrap(), &json!({ "enqueued": 20 }));
    system.stop().await;
}

/// A group without a cap costs no query, but for one in a second.
#[tokio::test(flavor = "multi_thread", worker_threads = 1)]
async fn without_a_cap_enqueueing_asks_for_settings_once_in_a_second() {
    use std::sync::{Arc, Mutex};

    use mongodb::event::{EventHandler, command::CommandEvent};
    use recruiter_common::store::ConnectArgs;

    let database = TestDatabase::new().await;
    let sent: Arc<Mutex<Vec<String>>> = Arc::default();
    let note = sent.clone();
    let commands = EventHandler::callback(move |event: CommandEvent| {
        if let CommandEvent::Started(started) = event {
            note.lock().unwrap().extend(step(&started.command));
        }
    });
    let store = Store::connect(ConnectArgs { commands: Some(commands), ..ConnectArgs::to(database.uri()) }, "test").await.unwrap();
    let began = Monotonic::now();
    sent.lock().unwrap().clear();
    for _ in 0..200 {
        store.enqueue_many(jobs(1)).await.unwrap();
    }
    let most = began.elapsed().as_secs() + 1;
    let sent = std::mem::take(&mut *sent.lock().unwrap());
    let number = |of: &str| sent.iter().filter(|step| step.starts_with(of)).count() as u64;
    assert!(number("find groups") <= most && number("aggregate") == 0 && number("insert scheduled") == 200, "{sent:?}");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 1)]
async fn caps_are_set_and_listed_by_hand() {
    let (database, store) = prepared().await;
    let set = |group: &str, most: &str| recruiter(&database, &["groups", "set", group, "--most-waiting", most, "--json"]);
    assert_eq!(set("mail", "2").objects(), [json!({ "name": "mail", "most_waiting": 2 })]);
    assert_eq!(set("$a.b", "1000000000").objects(), [json!({ "name": "$a.b", "most_waiting": 1_000_000_000 })]);
    // Another setting of the same group stays.
    database.raw("groups").update_one(doc! { "_id": "mail" }, doc! { "$set": { "weight": 3 } }).await.unwrap();
    assert_eq!(set("mail", "1").objects(), [json!({ "name": "mail", "most_waiting": 1, "weight": 3.0 })]);
    assert_eq!(database.only("groups", doc! { "_id": "mail" }).await, doc! { "_id": "mail", "most_waiting": 1_i64, "weight": 3 });
    let enqueue = || recruiter(&database, &["enqueue", "--class", "c", "--group", "mail"]);
    assert_eq!(enqueue().code, 0);
    let said = enqueue();
    assert!(said.code == 1 && said.err.contains("group `mail` accepts at most 1 waiting jobs"), "{}", said.err);
    let listed = recruiter(&database, &["groups", "list", "--json"]).objects();
    let both = [
        json!({ "name": "$a.b", "most_waiting": 1_000_000_000, "waiting": 0 }),
        json!({ "name": "mail", "most_waiting": 1, "weight": 3.0, "waiting": 1 }),
    ];
    assert_eq!(listed, both);
    assert!(recruiter(&database, &["groups", "list"]).out.contains("mail"));
    assert_eq!(set("mail", "unset").objects(), [json!({ "name": "mail", "most_waiting": null, "weight": 3.0 })]);
    assert_eq!(set("never", "unset").objects(), [json!({ "name": "never" })]);
    assert_eq!(enqueue().code, 0);

    for (args, part) in [
        (["mail", "--most-waiting", "0"], "neither a number from 1"),
        (["mail", "--most-waiting", "-1"], "neither a number from 1"),
        (["mail", "--most-waiting", "2000000000"], "from 1 to 1000000000"),
        (["", "--most-waiting", "1"], "a name is empty"),
    ] {
        let said = recruiter(&database, &[&["groups", "set"], args.as_slice()].concat());
        assert!(said.code == 2 && said.err.contains(part), "{args:?}: {}", said.err);
    }
    assert_eq!(recruiter(&database, &["groups", "set", "mail"]).code, 2, "it needs a setting");
    assert!(matches!(store.groups().set_most_waiting("g", Some(0)).await, Err(SettingError::Invalid(_))));
    // From the shell.
    for wrong in [doc! { "_id": "x", "most_waiting": 0 }, doc! { "_id": "x", "most_waiting": "many" }, doc! { "_id": 5, "most_waiting": 1 }]
    {
        database.raw("groups").insert_one(wrong).await.unwrap_err();
    }
}

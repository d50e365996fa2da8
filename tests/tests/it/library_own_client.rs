//! The library on the application's own client: its transactions, its settings, and a schema that is not created unasked.

use std::sync::{Arc, Mutex};

use bson::{Document, doc};
use mongodb::{
    Client, ClientSession, Collection,
    error::{Error, TRANSIENT_TRANSACTION_ERROR, UNKNOWN_TRANSACTION_COMMIT_RESULT},
    event::{EventHandler, command::CommandEvent},
    options::ClientOptions,
};
use recruiter_common::{ConnectError, EnqueueError, JobId, NewJob, StoreError, store::Store};
use recruiter_tests::{fail_points::FailPoint, local, mongo::TestDatabase};

/// A shop: its own client, an order in one of its own collections, and a store on the same client.
struct Shop {
    client: Client,
    orders: Collection<Document>,
    store: recruiter_common::Client,
    sent: Arc<Mutex<Vec<Document>>>,
}

impl Shop {
    /// With these settings in its connection string, and the name of the database as its own. Nothing is set up in the database.
    async fn open(database: &TestDatabase, settings: &str) -> Self {
        let sent = Arc::new(Mutex::new(Vec::new()));
        let mut options = ClientOptions::parse(format!("{}{settings}&appName={}", database.uri(), database.name())).await.unwrap();
        let noted = sent.clone();
        options.command_event_handler = Some(EventHandler::callback(move |event| {
            if let CommandEvent::Started(started) = event {
                noted.lock().unwrap().push(started.command);
            }
        }));
        let client = Client::with_options(options).unwrap();
        let own = client.database(database.name());
        #[expect(clippy::disallowed_methods, reason = "a collection of the application's own")]
        let orders = own.collection("orders");
        Self { client, orders, store: recruiter_common::Client::from_database(own), sent }
    }

    /// Takes an order and enqueues its invoice, in one transaction.
    async fn order(&self, session: &mut ClientSession, number: i32) -> Result<(), EnqueueError> {
        session.start_transaction().await.map_err(driver)?;
        self.orders.insert_one(doc! { "_id": number }).session(&mut *session).await.map_err(driver)?;
        NewJob::of_class("SendInvoice", doc! { "order": number }).enqueue_in(&self.store, session).await.map(drop)
    }

    /// The same until it is committed, as MongoDB's manual says.
    async fn order_surely(&self, number: i32) {
        let mut session = self.client.start_session().await.unwrap();
        loop {
            let tried = match self.order(&mut session, number).await {
                Ok(()) => commit(&mut session).await.map_err(driver),
                Err(error) => session.abort_transaction().await.map_err(driver).and(Err(error)),
            };
            match tried {
                Ok(()) => return,
                Err(error) => assert!(has_label(&error, TRANSIENT_TRANSACTION_ERROR), "{error}"),
            }
        }
    }

    async fn start(&self) -> ClientSession {
        self.client.start_session().await.unwrap()
    }

    /// The commands of this name that were sent since this was asked last.
    fn sent(&self, name: &str) -> Vec<Document> {
        let sent = std::mem::take(&mut *self.sent.lock().unwrap());
        sent.into_iter().filter(|command| command.keys().next().is_some_and(|first| first == name)).collect()
    }
}

async fn commit(session: &mut ClientSession) -> Result<(), Error> {
    loop {
        match session.commit_transaction().await {
            Err(error) if error.contains_label(UNKNOWN_TRANSACTION_COMMIT_RESULT) => {}
            other => return other,
        }
    }
}

fn driver(source: Error) -> EnqueueError {
    StoreError::Mongo { operation: "the shop's own", source: source.into() }.into()
}

fn has_label(error: &EnqueueError, label: &str) -> bool {
    matches!(error, EnqueueError::Store(StoreError::Mongo { source, .. }) if source.contains_label(label))
}

/// How many orders and jobs there are.
async fn count(database: &TestDatabase) -> (u64, u64) {
    let count = async |collection| database.count(collection, doc! {}).await;
    (count("orders").await, count("scheduled").await)
}

#[tokio::test]
async fn a_job_and_the_applications_own_write_are_committed_or_aborted_together() {
    let database = TestDatabase::new().await;
    let shop = Shop::open(&database, "").await;
    shop.store.ensure_schema().await.unwrap();
    // A transaction cannot always create a collection.
    database.database().create_collection("orders").await.unwrap();
    let mut session = shop.start().await;
    shop.order(&mut session, 1).await.unwrap();
    assert_eq!(count(&database).await, (0, 0), "nothing is seen before the commit");
    session.abort_transaction().await.unwrap();
    assert_eq!(count(&database).await, (0, 0));
    shop.order(&mut session, 1).await.unwrap();
    session.commit_transaction().await.unwrap();
    shop.store.announce_jobs(["generic"]).await;
    assert_eq!(count(&database).await, (1, 1));
    // Two transactions take the same order: one meets the other.
    let mut other = shop.start().await;
    shop.order(&mut session, 2).await.unwrap();
    let conflict = shop.order(&mut other, 2).await.unwrap_err();
    assert!(has_label(&conflict, TRANSIENT_TRANSACTION_ERROR), "{conflict:?}");
    other.abort_transaction().await.unwrap();
    session.commit_transaction().await.unwrap();
    assert_eq!(count(&database).await, (2, 2));
}

/// The replies of a primary that steps down, and a connection that is lost with it.
#[tokio::test]
async fn a_failover_in_the_applications_transaction_leaves_one_order_and_one_job() {
    let database = TestDatabase::new().await;
    let shop = Shop::open(&database, "").await;
    shop.store.ensure_schema().await.unwrap();
    database.database().create_collection("orders").await.unwrap();
    let insert = || FailPoint::new(database.name(), &["insert"]).namespace(database.name(), "scheduled");
    // Such a fault cannot be limited to a collection, but to the name of the client.
    let commit = || FailPoint::new(database.name(), &["commitTransaction"]);
    let faults = [insert().error_code(10_107), insert().close_connection(), commit().error_code(10_107), commit().close_connection()];
    for (number, fault) in (1..).zip(faults) {
        let armed = fault.times(1).arm(database.uri()).await;
        shop.order_surely(number).await;
        assert_eq!(armed.struck().await, 1);
        let expected = u64::try_from(number).unwrap();
        assert_eq!(count(&database).await, (expected, expected));
    }
}

#[tokio::test]
async fn the_settings_of_the_applications_client_do_not_matter() {
    let (database, _) = local::prepared().await;
    let careless = "&w=1&journal=false&readConcernLevel=local&readPreference=secondary&maxPoolSize=1";
    let shop = Shop::open(&database, careless).await;
    let id = NewJob::of_class("x", doc! {}).enqueue(&shop.store).await.unwrap().id;
    let inserts = shop.sent("insert");
    let of_job =
        inserts.iter().find(|insert| insert.get_str("insert").is_ok_and(|collection| collection == "scheduled")).expect("it was inserted");
    let concern = of_job.get_document("writeConcern").unwrap();
    assert!((concern.get_str("w").unwrap(), concern.get_bool("j").unwrap()) == ("majority", true), "{concern}");
    // The set has no secondary: a read that asked for one would find no server.
    assert!(shop.store.job(id).await.unwrap().is_some());
    let read = &shop.sent("find")[0];
    assert_eq!(read.get_document("readConcern").unwrap().get_str("level").unwrap(), "majority", "{read}");
    assert_eq!(read.get_document("$readPreference").ok(), None, "{read}");
    Store::from(shop.store.clone()).with_own_connections("x").map(drop).unwrap_err();
}

#[tokio::test]
async fn the_schema_is_not_created_unasked() {
    let database = TestDatabase::new().await;
    let shop = Shop::open(&database, "").await;
    let enqueue = async || NewJob::of_class("x", doc! {}).enqueue(&shop.store).await;
    let refused = enqueue().await.unwrap_err();
    assert!(matches!(&refused, EnqueueError::NotSetUp { database: named } if *named == database.name()), "{refused}");
    let mut session = shop.start().await;
    session.start_transaction().await.unwrap();
    NewJob::of_class("x", doc! {}).enqueue_in(&shop.store, &mut session).await.unwrap_err();
    session.abort_transaction().await.unwrap();
    assert!(database.database().list_collection_names().await.unwrap().is_empty());
    // Another process creates the schema while this one runs.
    local::store(&database).await;
    enqueue().await.unwrap();
    // Once it is known to exist, it is not checked again.
    shop.sent("find");
    enqueue().await.unwrap();
    let reads_schema =
        |find: &Document| find.get_document("filter").is_ok_and(|filter| filter.get_str("_id").is_ok_and(|id| id == "schema"));
    assert!(!shop.sent("find").iter().any(reads_schema));
}

#[tokio::test]
async fn a_standalone_is_refused_for_the_applications_own_client_too() {
    let mongod = recruiter_tests::mongo::standalone_mongod().await;
    let client = Client::with_uri_str(mongod.uri()).await.unwrap();
    let refused = recruiter_common::Client::from_database(client.database("jobs")).ensure_schema().await.unwrap_err();
    assert!(matches!(refused, ConnectError::Standalone { .. }), "{refused}");
}

/// In a session of the store, also a transaction; a session of the client would commit with `w: 1`, which a failover can undo.
#[tokio::test]
async fn a_session_of_the_store_commits_by_a_majority() {
    let database = TestDatabase::new().await;
    let shop = Shop::open(&database, "&w=1&journal=false&readConcernLevel=local&readPreference=secondary").await;
    shop.store.ensure_schema().await.unwrap();
    database.database().create_collection("orders").await.unwrap();
    let mut session = shop.store.start_session().await.unwrap();
    shop.order(&mut session, 1).await.unwrap();
    session.commit_transaction().await.unwrap();
    assert_eq!(count(&database).await, (1, 1));
    let commit = &shop.sent("commitTransaction")[0];
    let concern = commit.get_document("writeConcern").unwrap();
    assert!((concern.get_str("w").unwrap(), concern.get_bool("j").unwrap()) == ("majority", true), "{commit}");
}

/// The call with an id is repeated: the job waits, or is archived.
#[tokio::test]
async fn a_job_with_an_id_is_enqueued_once_also_in_transactions() {
    let (database, store) = local::prepared().await;
    let [waiting, archived, new] = [JobId::new(), JobId::new(), JobId::new()];
    let job = |id: JobId| NewJob::of_class("x", doc! {}).with_id(id);
    job(waiting).enqueue(&store).await.unwrap();
    database.raw("archived").insert_one(doc! { "_id": archived, "why": "done" }).await.unwrap();
    let mut session = store.start_session().await.unwrap();
    session.start_transaction().await.unwrap();
    let unnamed = NewJob::of_class("x", doc! {});
    let enqueued = store.enqueue_many_in(&mut session, [job(waiting), job(archived), job(new), unnamed]).await.unwrap();
    assert_eq!(database.count("scheduled", doc! {}).await, 1, "nothing is seen before the commit");
    session.commit_transaction().await.unwrap();
    assert_eq!(enqueued.iter().map(|one| one.is_new).collect::<Vec<_>>(), [false, false, true, true]);
    assert_eq!(database.count("scheduled", doc! {}).await, 3);
}

#[tokio::test]
async fn without_a_transaction_nothing_is_enqueued_in_a_session() {
    let (database, store) = local::prepared().await;
    let mut session = store.start_session().await.unwrap();
    let refused = NewJob::of_class("x", doc! {}).enqueue_in(&store, &mut session).await.unwrap_err();
    assert!(matches!(refused, EnqueueError::Store(StoreError::NoTransaction { .. })), "{refused}");
    assert_eq!(count(&database).await, (0, 0));
}

//! Faults made by the server itself: its fail point `failCommand`, which makes commands fail, lose their connection or
//! wait.
//!
//! A server has one such fail point, so a test process arms one at a time on each server. It affects every process with this
//! `appName`, including those of other tests on the shared MongoDB. Therefore limit it to a collection
//! ([`FailPoint::namespace`]), or use [`own_mongod`](crate::mongo::own_mongod).

use std::{
    collections::HashMap,
    sync::{Arc, LazyLock, Mutex as Guarded},
    time::Duration,
};

use bson::{Bson, Document, doc};
use mongodb::Client;
use tokio::{
    sync::{Mutex, OwnedMutexGuard},
    time::timeout,
};

use crate::{
    mongo::{SELECTION_LIMIT, client, command_at_once},
    wait::SOON,
};

/// How long to wait for other tests to disarm their fail points.
const TURN_WITHIN: Duration = SOON.saturating_mul(4);

/// A fault that can be armed.
#[derive(Clone, Debug)]
#[must_use = "a fault strikes only when it is armed"]
pub struct FailPoint {
    mode: Bson,
    data: Document,
}

impl FailPoint {
    /// Affects these commands of clients with this `appName`, without limit. Until an effect is set, it changes
    /// nothing.
    pub fn new(app_name: &str, commands: &[&str]) -> Self {
        Self { mode: "alwaysOn".into(), data: doc! { "appName": app_name, "failCommands": commands } }
    }

    /// Limits it to the first `times` commands.
    pub fn times(mut self, times: i32) -> Self {
        self.mode = doc! { "times": times }.into();
        self
    }

    /// Skips the first `skip` commands, then affects all.
    pub fn skip(mut self, skip: i32) -> Self {
        self.mode = doc! { "skip": skip }.into();
        self
    }

    /// Limits it to commands on this collection (`database.collection`). Commands without a collection, such as a
    /// commit, are not affected.
    pub fn namespace(self, database: &str, collection: &str) -> Self {
        self.with("namespace", format!("{database}.{collection}"))
    }

    /// The command is not executed and returns this error.
    pub fn error_code(self, code: i32) -> Self {
        self.with("errorCode", code)
    }

    /// The labels of that error, instead of the server's own (`RetryableWriteError`, …).
    pub fn error_labels(self, labels: &[&str]) -> Self {
        self.with("errorLabels", labels)
    }

    /// The command is not executed, and its connection is closed.
    pub fn close_connection(self) -> Self {
        self.with("closeConnection", true)
    }

    /// The command is executed after this delay.
    pub fn block(self, time: Duration) -> Self {
        self.with("blockConnection", true).with("blockTimeMS", i64::try_from(time.as_millis()).expect("a sensible time"))
    }

    /// The command is executed, and its reply reports that the write concern was not satisfied: an unknown outcome.
    pub fn write_concern_error(self, code: i32) -> Self {
        self.with("writeConcernError", doc! { "code": code, "errmsg": "made by a fail point" })
    }

    fn with(mut self, key: &str, value: impl Into<Bson>) -> Self {
        self.data.insert(key, value.into());
        self
    }

    /// Arms it on the MongoDB at `uri`, until the guard is dropped.
    pub async fn arm(self, uri: &str) -> Armed {
        static TURNS: LazyLock<Guarded<HashMap<String, Arc<Mutex<()>>>>> = LazyLock::new(Guarded::default);
        let client = client(uri, SELECTION_LIMIT).await;
        let server = uri.split('/').nth(2).expect("the URI has hosts").to_owned();
        let turn = Arc::clone(TURNS.lock().expect("no holder panics").entry(server).or_default());
        let turn = timeout(TURN_WITHIN, turn.lock_owned()).await.expect("other fail points are disarmed in time; one test arms one");
        let command = doc! { "configureFailPoint": "failCommand", "mode": self.mode, "data": self.data };
        let reply = client.database("admin").run_command(command).await.expect("mongod runs with enableTestCommands=1");
        Armed { uri: uri.to_owned(), client, before: times_entered(&reply, "count"), _turn: turn }
    }
}

/// An armed fault. Dropping it disarms it.
#[derive(Debug)]
#[must_use = "dropping this disarms the fault"]
pub struct Armed {
    uri: String,
    client: Client,
    before: i64,
    _turn: OwnedMutexGuard<()>,
}

impl Armed {
    /// Number of commands affected so far.
    pub async fn struck(&self) -> i64 {
        const NAME: &str = "failpoint.failCommand";
        let reply = self.client.database("admin").run_command(doc! { "getParameter": 1, NAME: 1 }).await.expect("the server answers");
        times_entered(reply.get_document(NAME).expect("the reply has the parameter"), "timesEntered") - self.before
    }
}

impl Drop for Armed {
    fn drop(&mut self) {
        let disarmed = command_at_once(&self.uri, "admin", doc! { "configureFailPoint": "failCommand", "mode": "off" }, SELECTION_LIMIT);
        // A killed server has lost it. On a live server it would disturb other tests.
        if let Err(error) = disarmed
            && !std::thread::panicking()
        {
            assert!(error.to_string().contains("Server selection timeout"), "the fail point is still armed: {error}");
        }
    }
}

fn times_entered(reply: &Document, field: &str) -> i64 {
    match reply.get(field) {
        Some(Bson::Int32(times)) => (*times).into(),
        Some(Bson::Int64(times)) => *times,
        other => panic!("a fail point counts in `{field}`, not {other:?}"),
    }
}

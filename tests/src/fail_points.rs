//! Faults made by the server itself: its fail point `failCommand`, which makes commands fail, lose their connection or wait.
//!
//! A server has one such fail point, so one is armed at a time in a test process. It strikes every process that goes by its
//! `appName`, those of other tests on the shared MongoDB too: name the collection as well ([`FailPoint::namespace`]), or
//! use [`own_mongod`](crate::mongo::own_mongod).

use std::time::Duration;

use bson::{Bson, Document, doc};
use mongodb::Client;
use tokio::{
    sync::{Mutex, MutexGuard},
    time::timeout,
};

use crate::mongo::command_at_once;

/// How long to wait for another test to disarm its fail point.
const TURN_WITHIN: Duration = Duration::from_secs(120);

/// A fault to be armed.
#[derive(Clone, Debug)]
#[must_use = "a fault strikes only when it is armed"]
pub struct FailPoint {
    mode: Bson,
    data: Document,
}

impl FailPoint {
    /// Strikes these commands of clients with this `appName`, always, and does nothing to them until told what.
    pub fn new(app_name: &str, commands: &[&str]) -> Self {
        Self { mode: "alwaysOn".into(), data: doc! { "appName": app_name, "failCommands": commands } }
    }

    /// Strikes so many times only.
    pub fn times(mut self, times: i32) -> Self {
        self.mode = doc! { "times": times }.into();
        self
    }

    /// Leaves so many commands alone first, then strikes always.
    pub fn skip(mut self, skip: i32) -> Self {
        self.mode = doc! { "skip": skip }.into();
        self
    }

    /// Strikes commands on this collection only (`database.collection`); those that name none, like a commit, are spared.
    pub fn namespace(self, database: &str, collection: &str) -> Self {
        self.with("namespace", format!("{database}.{collection}"))
    }

    /// The command is not done and answers with this error.
    pub fn error_code(self, code: i32) -> Self {
        self.with("errorCode", code)
    }

    /// The labels of that error, instead of those that the server would give it (`RetryableWriteError`, …).
    pub fn error_labels(self, labels: &[&str]) -> Self {
        self.with("errorLabels", labels)
    }

    /// The command is not done and its connection is closed.
    pub fn close_connection(self) -> Self {
        self.with("closeConnection", true)
    }

    /// The command is done only after this time.
    pub fn block(self, time: Duration) -> Self {
        self.with("blockConnection", true).with("blockTimeMS", i64::try_from(time.as_millis()).expect("a sensible time"))
    }

    /// The command is done, and its answer says that its write concern was not satisfied: an unknown outcome.
    pub fn write_concern_error(self, code: i32) -> Self {
        self.with("writeConcernError", doc! { "code": code, "errmsg": "made by a fail point" })
    }

    fn with(mut self, key: &str, value: impl Into<Bson>) -> Self {
        self.data.insert(key, value.into());
        self
    }

    /// Arms it at the MongoDB behind `uri`, until the guard is dropped.
    pub async fn arm(self, uri: &str) -> Armed {
        static ONE_AT_A_TIME: Mutex<()> = Mutex::const_new(());
        let turn = timeout(TURN_WITHIN, ONE_AT_A_TIME.lock()).await.expect("other fail points are disarmed in time; one test arms one");
        let client = Client::with_uri_str(uri).await.expect("the URI is good");
        let command = doc! { "configureFailPoint": "failCommand", "mode": self.mode, "data": self.data };
        let reply = client.database("admin").run_command(command).await.expect("mongod runs with enableTestCommands=1");
        Armed { uri: uri.to_owned(), client, before: times_entered(&reply, "count"), _turn: turn }
    }
}

/// An armed fault; dropping it disarms it.
#[derive(Debug)]
#[must_use = "dropping this disarms the fault"]
pub struct Armed {
    uri: String,
    client: Client,
    before: i64,
    _turn: MutexGuard<'static, ()>,
}

impl Armed {
    /// How many commands it has struck so far.
    pub async fn struck(&self) -> i64 {
        const NAME: &str = "failpoint.failCommand";
        let reply = self.client.database("admin").run_command(doc! { "getParameter": 1, NAME: 1 }).await.expect("the server answers");
        times_entered(reply.get_document(NAME).expect("the reply has the parameter"), "timesEntered") - self.before
    }
}

impl Drop for Armed {
    fn drop(&mut self) {
        let disarmed = command_at_once(&self.uri, "admin", doc! { "configureFailPoint": "failCommand", "mode": "off" });
        // A server that was killed has forgotten it; a living one that keeps it would spoil other tests.
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

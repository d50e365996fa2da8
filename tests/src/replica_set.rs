//! A replica set of several real mongods, for faults of its primary, its processes and the network between them.
//!
//! The members know each other by the listeners of a [`Proxy`] of their own, which is the network between them. Clients
//! that use the set's own connection string use that network too: they lose a member when the others do. A client that
//! uses a [`ReplicaSet::proxy`] has another network, and still reaches an isolated primary.

use std::time::Duration;

use bson::{Bson, Document, doc, oid::ObjectId};
use futures_util::future::join_all;
use mongodb::{Client, error::Result, options::ClientOptions};
use recruiter_dev::embedded::{EmbeddedMongo, Options};
use tokio::time::timeout;

use crate::{
    mongo::temporary,
    proxy::{Member, Proxy},
    wait::{SOON, wait_for, wait_until, within},
};

/// Maximum time until all members follow one primary, or there is another primary.
const SETTLES_WITHIN: Duration = SOON;
/// How long to wait for a member's reply before it counts as silent.
const ANSWERS_WITHIN: Duration = Duration::from_millis(500);
/// How long a primary that stepped down does not stand for election, in seconds.
const STANDS_BACK: i32 = 5;

/// The replica set `rs0` on loopback, with test commands, quick elections and temporary data. It ends with its owner,
/// as [`EmbeddedMongo`] does.
#[derive(Debug)]
pub struct ReplicaSet {
    members: Vec<EmbeddedMongo>,
    network: Proxy,
}

impl ReplicaSet {
    /// Starts `members` members and waits until one is primary and the others follow it.
    pub async fn start(members: usize) -> Self {
        Self::start_with(&vec![&[][..]; members]).await
    }

    /// Like [`start`](Self::start), with an environment for each member, for example of a
    /// [`Clock`](crate::clocks::Clock).
    pub async fn start_with(environments: &[&[(&str, &str)]]) -> Self {
        let member = async |environment: &&[(&str, &str)]| {
            let environment = environment.iter().map(|(name, value)| ((*name).to_owned(), (*value).to_owned())).collect();
            // Shorter waits: for clients after a signal to end, and for the reply of a lost member.
            let quick = ["shutdownTimeoutMillisForSignaledShutdown=500", "oplogNetworkTimeoutBufferSeconds=1"];
            let arguments = quick.iter().flat_map(|parameter| ["--setParameter".to_owned(), (*parameter).to_owned()]).collect();
            EmbeddedMongo::start(Options { member: true, arguments, environment, ..temporary() }).await.expect("mongod starts")
        };
        let members = join_all(environments.iter().map(member)).await;
        let network = Proxy::between(&members.iter().map(EmbeddedMongo::port).collect::<Vec<_>>());
        let this = Self { members, network };
        let hosts = this.network.listeners().iter().zip(0_i32..).map(|(host, id)| doc! { "_id": id, "host": host });
        // Members replicate only from the primary, so that a frozen member, or one with a wrong clock, delays no other.
        let settings =
            doc! { "electionTimeoutMillis": 1_000, "heartbeatIntervalMillis": 200, "heartbeatTimeoutSecs": 1, "chainingAllowed": false };
        let config = doc! { "_id": "rs0", "members": hosts.collect::<Vec<_>>(), "settings": settings };
        this.command(0, doc! { "replSetInitiate": config }).await.expect("the set is initiated once");
        this.whole().await;
        this
    }

    /// `host:port` of a member, without a proxy. The set names another one.
    pub fn address(&self, member: usize) -> String {
        format!("127.0.0.1:{}", self.members[member].port())
    }

    /// The process id of a member.
    pub fn pid(&self, member: usize) -> u32 {
        self.members[member].pid()
    }

    /// The connection string.
    pub fn uri(&self) -> String {
        self.uri_for("")
    }

    /// The connection string with a default database.
    pub fn uri_for(&self, database: &str) -> String {
        self.network.uri(database)
    }

    /// A proxy to the set: a separate network for one process.
    pub fn proxy(&self) -> Proxy {
        let member =
            |(name, mongo): (&String, &EmbeddedMongo)| Member { name: name.clone(), address: format!("127.0.0.1:{}", mongo.port()) };
        Proxy::before_members(self.network.listeners().iter().zip(&self.members).map(member).collect())
    }

    /// Runs a command on the database `admin` of a member, without a proxy.
    ///
    /// # Errors
    /// The member's error, or that it did not reply.
    pub async fn command(&self, member: usize, command: Document) -> Result<Document> {
        self.command_within(Duration::from_secs(30), member, command).await
    }

    async fn command_within(&self, within: Duration, member: usize, command: Document) -> Result<Document> {
        let uri = format!("mongodb://{}/?directConnection=true", self.address(member));
        let mut options = ClientOptions::parse(uri).await?;
        options.connect_timeout = Some(within);
        options.server_selection_timeout = Some(within);
        Client::with_options(options)?.database("admin").run_command(command).await
    }

    /// Waits for a primary. An isolated one may believe for a moment that it still is; then this returns the one
    /// elected last.
    pub async fn primary(&self) -> usize {
        wait_for(SETTLES_WITHIN, "there is a primary", async || self.elected().await).await
    }

    /// Waits for a primary other than this member.
    pub async fn primary_other_than(&self, member: usize) -> usize {
        let other = async || self.elected().await.filter(|elected| *elected != member);
        wait_for(SETTLES_WITHIN, "there is another primary", other).await
    }

    /// Waits until all members run and follow one primary.
    pub async fn whole(&self) {
        let whole = async || {
            let Some(states) = self.hellos().await.into_iter().collect::<Option<Vec<_>>>() else { return false };
            let is = |hello: &Document, state: &str| hello.get_bool(state).unwrap_or(false);
            let known = |hello: &Document| hello.get_str("primary").map(ToOwned::to_owned).ok();
            let primaries = states.iter().filter(|hello| is(hello, "isWritablePrimary")).count();
            let agreed = known(&states[0]).is_some() && states.iter().all(|hello| known(hello) == known(&states[0]));
            primaries == 1 && agreed && states.iter().all(|hello| is(hello, "isWritablePrimary") || is(hello, "secondary"))
        };
        if !within(SETTLES_WITHIN, whole).await {
            let states =
                join_all((0..self.members.len()).map(|member| self.command_within(ANSWERS_WITHIN, member, doc! { "replSetGetStatus": 1 })))
                    .await;
            panic!("the replica set is not whole after {SETTLES_WITHIN:?}; each member says: {states:#?}");
        }
    }

    /// Makes the primary step down. Returns the next one.
    pub async fn step_down(&self) -> usize {
        let stepped_down = async || {
            let primary = self.elected().await?;
            let command = doc! { "replSetStepDown": STANDS_BACK, "secondaryCatchUpPeriodSecs": 1, "force": true };
            self.command(primary, command).await.ok().map(|_| primary)
        };
        let before = wait_for(SETTLES_WITHIN, "a primary steps down", stepped_down).await;
        self.primary_other_than(before).await
    }

    /// Makes this member the primary.
    pub async fn elect(&self, member: usize) {
        // MongoDB refuses while the member lags behind.
        let elected = async || self.command(member, doc! { "replSetStepUp": 1 }).await.is_ok() && self.elected().await == Some(member);
        wait_until(SETTLES_WITHIN, "the member is elected", elected).await;
    }

    /// Ends a member by force (`SIGKILL`).
    pub async fn kill(&mut self, member: usize) {
        self.members[member].kill().await.expect("it was running");
    }

    /// Freezes a member (`SIGSTOP`). Its sockets stay open.
    pub fn pause(&mut self, member: usize) {
        self.members[member].pause().expect("it is running");
    }

    /// Resumes a frozen member (`SIGCONT`).
    pub fn resume(&mut self, member: usize) {
        self.members[member].resume().expect("it is running");
    }

    /// Restarts a member, after a clean end if it is running.
    pub async fn restart(&mut self, member: usize) {
        self.members[member].restart().await.expect("mongod starts again");
    }

    /// Restarts every member in turn, as for an upgrade: each when the previous one follows again, the primary last.
    pub async fn restart_all(&mut self) {
        let primary = self.primary().await;
        for member in (0..self.members.len()).filter(|member| *member != primary).chain([primary]).collect::<Vec<_>>() {
            self.restart(member).await;
            self.whole().await;
        }
    }

    /// Isolates a member from the others and from clients of the set's own connection string: nothing is delivered, and
    /// no connection is closed.
    pub fn isolate(&self, member: usize) {
        self.network.isolate(member);
    }

    /// Ends all isolation.
    pub fn heal(&self) {
        self.network.heal();
    }

    async fn elected(&self) -> Option<usize> {
        let election = |(member, hello): (usize, Option<Document>)| {
            let hello = hello.filter(|hello| hello.get_bool("isWritablePrimary").unwrap_or(false))?;
            // The election id grows with each term.
            hello.get("electionId").and_then(Bson::as_object_id).map(|election: ObjectId| (election, member))
        };
        self.hellos().await.into_iter().enumerate().filter_map(election).max().map(|(_, member)| member)
    }

    async fn hellos(&self) -> Vec<Option<Document>> {
        // A member that freezes just after the request would be waited for without a limit.
        let hello =
            async |member| timeout(ANSWERS_WITHIN * 4, self.command_within(ANSWERS_WITHIN, member, doc! { "hello": 1 })).await.ok()?.ok();
        join_all((0..self.members.len()).map(hello)).await
    }
}

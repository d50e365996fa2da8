//! The MongoDB: members and their clocks, release, disk, oplog, and the roles of the user.

use std::time::Duration;

use bson::{Bson, Document, Timestamp, doc};
use chrono::TimeDelta;
use futures_util::future::join_all;
use mongodb::options::ServerAddress;

use super::{Check, Finding, State, encryption, number};
use crate::{
    base::{in_words, printable},
    mongo::{Client, Store, StoreError, call_within},
};

/// How long a single question may take. A member that does not answer delays the others by this.
const WITHIN: Duration = Duration::from_secs(5);
/// After a failover, dates jump by the difference of two clocks.
const CLOCKS_DIFFER: TimeDelta = TimeDelta::seconds(1);
/// Parts of the file system that are in use, in percent.
const FULL: (i64, i64) = (80, 95);
/// Shortest time that the oplog should reach back: what a member or a subscriber may be away.
const OPLOG: Duration = Duration::from_secs(86_400);
/// The oldest release of MongoDB that its makers still mend.
const MAINTAINED: i64 = 7;
/// Roles that go beyond `readWrite` on one database. Everyone with the connection string has them.
const WIDE: [&str; 14] = [
    "root",
    "__system",
    "readWriteAnyDatabase",
    "readAnyDatabase",
    "dbAdminAnyDatabase",
    "userAdminAnyDatabase",
    "userAdmin",
    "dbOwner",
    "clusterAdmin",
    "clusterManager",
    "hostManager",
    "backup",
    "restore",
    "dbAdmin",
];

/// The role with which the server can be examined.
const SERVER_READER: &str = "recruiterServerReader on `admin`, which the script roles.js makes (docs/operating.md),";

pub(super) async fn findings(store: &Store) -> Vec<Finding> {
    let hello = match ask(store, "admin", doc! { "hello": 1 }).await {
        Ok(hello) => hello,
        Err(error) => return vec![Finding::unknown(Check::ReplicaSet, "read", &error)],
    };
    let hosts = texts(&hello, "hosts");
    let status = ask(store, "admin", doc! { "replSetGetStatus": 1 });
    let (status, clocks, release, disk, oplog, roles) =
        tokio::join!(status, clocks(store, &hosts), release(store), disk(store), oplog(store), roles(store, &hosts));
    let mut findings = replica_set(&hello, status);
    findings.extend([release, clocks, disk, oplog, roles, encryption::finding(store.options.as_deref(), &hosts)]);
    findings
}

async fn ask(client: &Client, database: &str, command: Document) -> Result<Document, StoreError> {
    let database = client.driver.database(database);
    call_within(WITHIN, "examine_server", async move { database.run_command(command).await }).await
}

fn texts(document: &Document, field: &str) -> Vec<String> {
    document.get_array(field).into_iter().flatten().filter_map(Bson::as_str).map(str::to_owned).collect()
}

fn replica_set(hello: &Document, status: Result<Document, StoreError>) -> Vec<Finding> {
    let (data, arbiters) = (texts(hello, "hosts").len() + texts(hello, "passives").len(), texts(hello, "arbiters").len());
    let name = printable(hello.get_str("setName").unwrap_or("?"), 60);
    let warning = |text: String| Finding::warning(Check::ReplicaSet, text);
    let mut findings = Vec::new();
    match data {
        0 | 1 => findings.push(warning(format!(
            "`{name}` has one member: if its disk is lost, all jobs are lost, and while it restarts none runs; add two more members"
        ))),
        2 if arbiters == 0 => findings.push(warning(format!(
            "`{name}` has two members: without one of them there is no primary and no majority; add a third member"
        ))),
        _ => {}
    }
    if arbiters > 0 {
        findings.push(warning(format!(
            "`{name}` has an arbiter, which holds no data: while a member with data is away, writes may wait for a majority in vain; \
             replace the arbiter by a member with data"
        )));
    }
    match status {
        Ok(status) => findings.extend(down(&status)),
        Err(error) => findings.push(Finding::unknown(Check::ReplicaSet, SERVER_READER, &error)),
    }
    if findings.iter().all(|finding| finding.state == State::Unknown) {
        let primary = printable(hello.get_str("primary").unwrap_or("?"), 120);
        findings.insert(0, Finding::good(Check::ReplicaSet, format!("`{name}` has {data} members with data; the primary is {primary}")));
    }
    findings
}

/// The members that do not answer the primary.
fn down(status: &Document) -> Option<Finding> {
    let members = status.get_array("members").ok()?.iter().filter_map(Bson::as_document);
    let down = members.filter(|member| number(member, "health") == Some(0));
    let down: Vec<String> = down.filter_map(|member| Some(printable(member.get_str("name").ok()?, 120))).collect();
    (!down.is_empty()).then(|| {
        Finding::error(
            Check::ReplicaSet,
            format!("these members do not answer the primary: {}; start them, or remove them", down.join(", ")),
        )
    })
}

/// Asks each member by a connection of its own.
async fn clocks(store: &Store, hosts: &[String]) -> Finding {
    let differences = join_all(hosts.iter().map(|host| difference(store, host))).await;
    let differ = |(host, found): (&String, &Option<TimeDelta>)| {
        let difference = (*found)?;
        (difference.abs() > CLOCKS_DIFFER).then(|| {
            let by = in_words(difference.abs().to_std().unwrap_or_default());
            format!("{} is {by} {} of the primary", printable(host, 120), if difference > TimeDelta::zero() { "ahead" } else { "behind" })
        })
    };
    let different: Vec<String> = hosts.iter().zip(&differences).filter_map(differ).collect();
    let answered = differences.iter().flatten().count();
    if !different.is_empty() {
        let text = format!("{}: after a failover, due dates shift by that; run NTP on all members", different.join(", "));
        return Finding::warning(Check::Clocks, text);
    }
    if answered < hosts.len() || hosts.is_empty() {
        let silent = hosts.iter().zip(&differences).filter(|(_, found)| found.is_none()).map(|(host, _)| printable(host, 120));
        let text = format!("not reached from here: {}", silent.collect::<Vec<_>>().join(", "));
        return Finding::new(Check::Clocks, State::Unknown, text);
    }
    let text = match answered {
        1 => "the clock of the only member is that of the primary".to_owned(),
        several => format!("the clocks of {several} members differ by less than a second"),
    };
    Finding::good(Check::Clocks, text)
}

/// How far the clock of a member is ahead of the primary's; `None` if it does not answer.
async fn difference(store: &Store, host: &str) -> Option<TimeDelta> {
    let mut options = store.options.as_deref()?.clone();
    options.hosts = vec![ServerAddress::parse(host).ok()?];
    options.direct_connection = Some(true);
    options.server_selection_timeout = Some(WITHIN / 2);
    options.command_event_handler = None;
    options.sdam_event_handler = None;
    let member = mongodb::Client::with_options(options).ok()?.database("admin");
    let hello = async move {
        // The first one waits for the connection.
        member.run_command(doc! { "hello": 1 }).await?;
        member.run_command(doc! { "hello": 1 }).await
    };
    let reply = call_within(WITHIN, "examine_server", hello).await.ok()?;
    Some(reply.get_datetime("localTime").ok()?.to_chrono() - store.now())
}

async fn release(store: &Store) -> Finding {
    let build = match ask(store, "admin", doc! { "buildInfo": 1 }).await {
        Ok(build) => build,
        Err(error) => return Finding::unknown(Check::Version, "read", &error),
    };
    of_version(&printable(build.get_str("version").unwrap_or("?"), 40))
}

fn of_version(version: &str) -> Finding {
    match version.split('.').next().and_then(|major| major.parse::<i64>().ok()) {
        Some(major) if major < MAINTAINED => {
            let text = format!("MongoDB {version} works, but gets no more security updates; upgrade to {MAINTAINED}.0 or newer");
            Finding::warning(Check::Version, text)
        }
        _ => Finding::good(Check::Version, format!("MongoDB {version}")),
    }
}

async fn disk(store: &Store) -> Finding {
    match ask(store, store.database.name(), doc! { "dbStats": 1 }).await {
        Ok(stats) => of_disk(&stats),
        Err(error) => Finding::unknown(Check::Disk, "read", &error),
    }
}

fn of_disk(stats: &Document) -> Finding {
    let (Some(used), Some(total @ 1..)) = (number(stats, "fsUsedSize"), number(stats, "fsTotalSize")) else {
        return Finding::new(Check::Disk, State::Unknown, "the server does not say how full its file system is");
    };
    let percent = used.saturating_mul(100) / total;
    let text = format!("{percent} % of the primary's file system is in use");
    let remedy = "free some space, or keep archived jobs for a shorter time (--keep-archived of the cleaners): without space MongoDB ends";
    match percent {
        percent if percent >= FULL.1 => Finding::error(Check::Disk, format!("{text}: {remedy}")),
        percent if percent >= FULL.0 => Finding::warning(Check::Disk, format!("{text}: {remedy}")),
        _ => Finding::good(Check::Disk, text),
    }
}

/// How far back the oplog of the primary reaches.
async fn oplog(store: &Store) -> Finding {
    let end = |direction: i32| {
        let find = doc! { "find": "oplog.rs", "sort": { "$natural": direction }, "limit": 1, "projection": { "_id": 0, "ts": 1 } };
        ask(store, "local", find)
    };
    let ends = match tokio::try_join!(end(1), end(-1)) {
        Ok((first, last)) => time_of(&first).zip(time_of(&last)),
        Err(denied) if denied.is_unauthorized() => match ask(store, "admin", status_of_oplog()).await {
            Ok(status) => status.get_document("oplog").ok().and_then(ends_in),
            Err(_) => return Finding::unknown(Check::Oplog, SERVER_READER, &denied),
        },
        Err(error) => return Finding::unknown(Check::Oplog, SERVER_READER, &error),
    };
    let size = ask(store, "local", doc! { "collStats": "oplog.rs" }).await.unwrap_or_default();
    let Some((first, last)) = ends else {
        return Finding::new(Check::Oplog, State::Unknown, "the server shows no oplog");
    };
    let window = Duration::from_secs(u64::from(last.saturating_sub(first)));
    // One that has never been full says nothing of the future.
    let is_full = number(&size, "size").zip(number(&size, "maxSize")).is_some_and(|(size, most)| size > most / 10 * 9);
    of_oplog(window, is_full)
}

fn of_oplog(window: Duration, is_full: bool) -> Finding {
    let text = format!("the oplog reaches {} back", in_words(window));
    if is_full && window < OPLOG {
        let text = format!(
            "{text}: a member that is away for longer must copy all data, and a subscriber misses messages; make it larger with replSetResizeOplog"
        );
        return Finding::warning(Check::Oplog, text);
    }
    Finding::good(Check::Oplog, if is_full { text } else { format!("{text}, and has room") })
}

/// For a user who may not read the oplog, which has the documents of all databases.
fn status_of_oplog() -> Document {
    let others = ["metrics", "repl", "wiredTiger", "locks", "tcmalloc", "transactions", "network", "opLatencies"];
    let others = others.map(|section| (section.to_owned(), Bson::from(0)));
    [("serverStatus".to_owned(), 1.into()), ("oplog".to_owned(), 1.into())].into_iter().chain(others).collect()
}

fn ends_in(oplog: &Document) -> Option<(u32, u32)> {
    let time = |field: &str| oplog.get_timestamp(field).ok().map(|Timestamp { time, .. }| time);
    time("earliestOptime").zip(time("latestOptime"))
}

fn time_of(reply: &Document) -> Option<u32> {
    let entry = reply.get_document("cursor").ok()?.get_array("firstBatch").ok()?.first()?.as_document()?;
    entry.get_timestamp("ts").ok().map(|Timestamp { time, .. }| time)
}

async fn roles(store: &Store, hosts: &[String]) -> Finding {
    let status = match ask(store, "admin", doc! { "connectionStatus": 1 }).await {
        Ok(status) => status,
        Err(error) => return Finding::unknown(Check::Roles, "read", &error),
    };
    let info = status.get_document("authInfo").cloned().unwrap_or_default();
    of_roles(&info, hosts, store.database.name())
}

fn of_roles(info: &Document, hosts: &[String], database: &str) -> Finding {
    if info.get_array("authenticatedUsers").is_ok_and(Vec::is_empty) {
        let is_loopback = |host: &String| ["127.", "localhost:", "[::1]", "/"].iter().any(|begin| host.starts_with(begin));
        return if hosts.iter().all(is_loopback) {
            Finding::good(Check::Roles, "no access control; the members listen on this machine only")
        } else {
            let text = "MongoDB asks for no user: everyone who reaches it can read and write all jobs; turn on access control";
            Finding::warning(Check::Roles, text)
        };
    }
    let granted = info.get_array("authenticatedUserRoles").into_iter().flatten().filter_map(Bson::as_document);
    let wide = granted.filter_map(|role| Some((role.get_str("role").ok()?, role.get_str("db").unwrap_or_default())));
    let wide: Vec<String> =
        wide.filter(|(role, _)| WIDE.contains(role)).map(|(role, on)| printable(&format!("{role} on {on}"), 80)).collect();
    if wide.is_empty() {
        return Finding::good(Check::Roles, "the user of this command has no role beyond its database");
    }
    let text = format!(
        "the user of this command has {}: if the recruiter, the cleaners or the workers have the same user, give each one with its own role \
         on `{}` only; the script roles.js makes these roles (docs/operating.md)",
        wide.join(", "),
        printable(database, 80)
    );
    Finding::warning(Check::Roles, text)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn check(findings: &[Finding], expected: &[(State, &str)]) {
        let is_as_expected = |(found, (state, part)): (&Finding, &(State, &str))| found.state == *state && found.text.contains(part);
        assert!(findings.len() == expected.len() && findings.iter().zip(expected).all(is_as_expected), "{expected:?}: {findings:#?}");
    }

    #[test]
    fn a_replica_set_that_cannot_lose_a_member_is_named() {
        let of = |hosts: &[&str], arbiters: &[&str], health: &[Bson]| {
            let hello = doc! { "setName": "rs0", "hosts": hosts, "arbiters": arbiters, "primary": hosts[0] };
            let members: Vec<Document> =
                health.iter().enumerate().map(|(n, health)| doc! { "name": format!("m{n}"), "health": health }).collect();
            replica_set(&hello, Ok(doc! { "members": members }))
        };
        check(&of(&["a:1"], &[], &[]), &[(State::Warning, "`rs0` has one member")]);
        check(&of(&["a:1", "b:1"], &[], &[]), &[(State::Warning, "add a third member")]);
        check(&of(&["a:1", "b:1"], &["c:1"], &[]), &[(State::Warning, "has an arbiter")]);
        let three = ["a:1", "b:1", "c:1"];
        check(&of(&three, &[], &[1.0.into(), 1.into()]), &[(State::Good, "3 members with data; the primary is a:1")]);
        check(&of(&three, &[], &[1.0.into(), 0.0.into(), 0_i64.into()]), &[(State::Error, "do not answer the primary: m1, m2")]);
    }

    #[test]
    fn a_full_disk_a_short_oplog_and_an_old_release_are_named() {
        let disk = |used: i64| of_disk(&doc! { "fsUsedSize": used, "fsTotalSize": 100.0 });
        check(
            &[disk(79), disk(80), disk(94), disk(95)],
            &[(State::Good, "79 %"), (State::Warning, "80 %"), (State::Warning, "free some space"), (State::Error, "95 %")],
        );
        check(&[of_disk(&doc! {}), of_disk(&doc! { "fsUsedSize": 1, "fsTotalSize": 0 })], &[(State::Unknown, "does not say"); 2]);
        let hours = |hours: u64, is_full: bool| of_oplog(Duration::from_secs(hours * 3_600), is_full);
        check(
            &[hours(23, true), hours(24, true), hours(1, false)],
            &[(State::Warning, "replSetResizeOplog"), (State::Good, "reaches 1day back"), (State::Good, "has room")],
        );
        check(
            &[of_version("6.0.5"), of_version("7.0.1"), of_version("?")],
            &[(State::Warning, "upgrade to 7.0"), (State::Good, "MongoDB 7.0.1"), (State::Good, "MongoDB ?")],
        );
    }

    #[test]
    fn whoever_can_reach_mongodb_or_has_wide_roles_is_named() {
        let nobody = doc! { "authenticatedUsers": [] };
        let [here, there] = [["127.0.0.1:27017".to_owned(), "localhost:1".into()], ["localhost:1".into(), "db1:27017".into()]];
        let user = |role: &str, on: &str| {
            let info =
                doc! { "authenticatedUsers": [{ "user": "u", "db": "admin" }], "authenticatedUserRoles": [{ "role": role, "db": on }] };
            of_roles(&info, &there, "jobs")
        };
        check(
            &[
                of_roles(&nobody, &here, "jobs"),
                of_roles(&nobody, &there, "jobs"),
                user("readWrite", "jobs"),
                user("recruiterLeader", "jobs"),
                user("dbOwner", "jobs"),
            ],
            &[
                (State::Good, "this machine only"),
                (State::Warning, "turn on access control"),
                (State::Good, "no role beyond its database"),
                (State::Good, "no role beyond its database"),
                (State::Warning, "dbOwner on jobs: if the recruiter, the cleaners or the workers have the same user, give each"),
            ],
        );
    }
}

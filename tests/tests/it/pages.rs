//! The pages: what they show, to whom, and that nothing of the database or of an address becomes HTML.

use std::{
    io::Write as _,
    process::{Command, Stdio},
    time::Duration,
};

use bson::{Bson, Document, doc, oid::ObjectId};
use recruiter_common::{Graph, Limit, NewJob, control::Change, limits::Paused, schedules::Schedule, shutdown::pause, store::RedactionRule};
use recruiter_tests::{
    factory::insert_unvalidated,
    fail_points::FailPoint,
    http::{Api, text},
    local::prepared,
    mongo::TestDatabase,
    processes::{Setup, System, binary},
    wait::{SOON, wait_for, wait_until},
};
use reqwest::{Method, header};
use tempfile::NamedTempFile;

const PAGES: [&str; 10] =
    ["/", "/jobs", "/groups", "/groups/why?group=a", "/workers", "/limits", "/schedules", "/events", "/cluster", "/nothing"];
const HOSTILE: &str = "<script>alert(1)</script>'\"onload=x \u{202e}";

/// The parts of an address that a page has as links.
fn links<'a>(page: &'a str, begin: &'a str) -> impl Iterator<Item = String> + 'a {
    let all = page.split("href=\"").skip(1).filter_map(|rest| rest.split('"').next());
    all.filter(move |link| link.starts_with(begin)).map(|link| link.replace("&#38;", "&").replace("&amp;", "&"))
}

/// A page has one script, that of the program, and nothing that HTML would run or that turns the direction of writing.
#[track_caller]
fn is_harmless(page: &str) {
    assert_eq!(page.matches("<script").count(), 1, "{page}");
    for forbidden in ["alert(1)<", "\"onload", "'\"", " style=", "javascript:", "\u{202e}"] {
        assert!(!page.contains(forbidden), "{forbidden}: {page}");
    }
}

pub(super) fn archived(more: Document) -> Document {
    let now = bson::DateTime::from_millis(bson::DateTime::now().timestamp_millis() - 60_000);
    let mut job = doc! {
        "_id": ObjectId::new(), "workable": { "class": "c", "parameters": { "a": 1 } }, "locked": false, "group": "g", "priority": 5,
        "created_at": now, "attempts": 1, "why": "gave-up", "last_execution": { "started_at": now, "ended_at": now },
    };
    job.extend(more);
    job
}

#[tokio::test]
async fn every_page_has_the_frame_and_its_files_are_kept() {
    let (database, _store) = prepared().await;
    let api = Api::serve(&database, &[]).await;
    for path in PAGES {
        let (status, page) = api.read(path).await;
        assert_eq!(status, if path == "/nothing" { 404 } else { 200 }, "{path}: {page}");
        is_harmless(&page);
        for part in
            ["<html lang=\"en\">", "<a class=\"skip\" href=\"#content\">", "<main id=\"content\"", "<nav aria-label=\"Sections\">", "<h1>"]
        {
            assert!(page.contains(part), "{path}: {part}: {page}");
        }
        let here = usize::from(path != "/nothing");
        assert_eq!(page.matches("aria-current=\"page\"").count(), here, "{path}");
        let is_renewed = !["/jobs", "/groups/why?group=a", "/events", "/nothing"].contains(&path);
        assert_eq!(page.contains(" data-again="), is_renewed, "{path}");
    }
    let (_, page) = api.read("/jobs").await;
    let assets: Vec<String> = links(&page, "/assets/").collect();
    assert_eq!(assets.len(), 2, "{page}");
    for path in assets {
        let answered = api.page(Method::GET, &path).send().await.unwrap();
        assert_eq!(answered.status(), 200);
        assert!(answered.headers()[header::CACHE_CONTROL].to_str().unwrap().contains("immutable"), "{path}");
    }
    assert_eq!(api.page(Method::GET, "/assets/0000000000000000/style.css").send().await.unwrap().status(), 404);
    assert_eq!(text(api.page(Method::POST, "/jobs")).await.0, 405);
}

#[tokio::test]
async fn a_link_of_another_site_is_followed_and_its_form_is_refused() {
    let (database, _store) = prepared().await;
    let api = Api::serve(&database, &["--anonymous", "operator"]).await;
    let sent = async |method: Method, headers: &[(&'static str, &str)]| {
        let path = if method == Method::GET { "/jobs" } else { "/pauses/pause?what=group:g" };
        let request = headers.iter().fold(api.page(method, path), |request, (name, value)| request.header(*name, *value));
        text(request).await.0
    };
    let followed = [("sec-fetch-site", "cross-site"), ("sec-fetch-mode", "navigate")];
    assert_eq!(sent(Method::GET, &followed).await, 200);
    assert_eq!(sent(Method::GET, &[("sec-fetch-site", "cross-site"), ("sec-fetch-mode", "no-cors")]).await, 403);
    assert_eq!(sent(Method::POST, &followed).await, 403);
    assert_eq!(sent(Method::POST, &[("origin", "http://example.org")]).await, 403);
    assert_eq!(sent(Method::GET, &[("host", "example.org")]).await, 403, "a foreign name may lead to this machine");
    assert!(database.all("pauses", doc! {}).await.is_empty());
}

#[tokio::test]
async fn nothing_of_the_database_becomes_html() {
    let (database, store) = prepared().await;
    let parameters = doc! { HOSTILE: HOSTILE, "more": "</pre><script>alert(1)</script>" };
    let job = NewJob::of_class(HOSTILE, parameters).in_group(HOSTILE).urn(HOSTILE).tag(HOSTILE);
    let waiting = job.enqueue(&store).await.unwrap().id;
    let (message, trace) = (format!("{HOSTILE}\n{HOSTILE}"), format!("{HOSTILE}\n").repeat(30_000));
    let failed = archived(doc! {
        "group": HOSTILE, "why": HOSTILE, "result": HOSTILE, "log": [{ "at": bson::DateTime::now(), "attempt": 1, "line": HOSTILE }],
        "progress": { "text": HOSTILE, "percent": 10.0 },
        "last_execution": { "started_at": bson::DateTime::now(), "ended_at": bson::DateTime::now(), "hostname": HOSTILE, "pid": 1_i64,
            "class": HOSTILE, "message": &message, "trace": &trace },
    });
    let id = failed.get_object_id("_id").unwrap();
    database.raw("archived").insert_one(failed).bypass_document_validation(true).await.unwrap();
    let odd = ObjectId::new();
    insert_unvalidated(&database, vec![doc! { "_id": HOSTILE, "locked": HOSTILE }, doc! { "_id": odd, "group": HOSTILE }]).await;
    for collection in ["roster", "limits", "groups", "pauses", "schedules"] {
        let document = doc! { "_id": HOSTILE, "hostname": HOSTILE, "by": HOSTILE, "reason": HOSTILE, "capacity": 1, "cron": HOSTILE };
        database.raw(collection).insert_one(document).bypass_document_validation(true).await.unwrap();
    }
    store.pauses().pause(&Paused::Group(HOSTILE.into()), HOSTILE, Some(HOSTILE)).await.unwrap();
    store.pauses().pause(&Paused::Line(HOSTILE.into()), HOSTILE, Some(HOSTILE)).await.unwrap();
    store.limits().set("printer", Limit::new(Some(1), None)).await.unwrap();
    let api = Api::serve(&database, &["--anonymous", "operator"]).await;
    let mut graph = Graph::new();
    graph.add(NewJob::of_class(HOSTILE, doc! {}).after(SOON));
    let graph_id = graph.id();
    graph.enqueue(&store).await.unwrap();
    let jobs = [format!("/jobs/{waiting}"), format!("/jobs/{id}"), format!("/jobs/{odd}"), format!("/jobs/{id}/retry")];
    let jobs = jobs.into_iter().chain([format!("/graphs/{graph_id}"), "/audit".into()]);
    let (_, groups) = api.read("/groups").await;
    let of_group: Vec<String> = links(&groups, "/groups/").chain(links(&groups, "/pauses/")).collect();
    assert!(of_group.len() >= 2, "{groups}");
    for path in PAGES[..9].iter().map(|path| (*path).to_owned()).chain(jobs).chain(of_group) {
        let (status, page) = api.read(&path).await;
        assert!([200, 409].contains(&status), "{path}: {page}");
        is_harmless(&page);
        assert!(page.len() < 400_000, "{path} has {} bytes", page.len());
    }
    let (_, page) = api.read(&format!("/jobs/{id}")).await;
    assert!(page.contains("&#60;script&#62;alert(1)") && page.contains("The whole trace is in the JSON"), "{page}");
    let whole = api.page(Method::GET, &format!("/jobs/{id}/json")).send().await.unwrap().json::<serde_json::Value>().await.unwrap();
    assert_eq!(whole["last_execution"]["trace"], trace, "the JSON has it as it is");
}

#[tokio::test]
async fn nothing_of_an_address_becomes_html_or_a_filter_of_its_own() {
    let (database, store) = prepared().await;
    NewJob::of_class("c", doc! {}).enqueue(&store).await.unwrap();
    let api = Api::serve(&database, &[]).await;
    let hostile: String = HOSTILE.bytes().map(|byte| format!("%{byte:02x}")).collect();
    // What the reader gives is in a field as it was given.
    let shown = hostile.split("%e2").next().unwrap();
    for (path, status) in [
        (format!("/jobs?class={shown}&message={shown}"), 200),
        (format!("/jobs?{hostile}=1"), 400),
        (format!("/jobs?state={hostile}"), 400),
        (format!("/jobs?since={hostile}"), 400),
        (format!("/jobs?after={hostile}"), 400),
        (format!("/jobs/{hostile}"), 400),
        (format!("/groups/why?group={hostile}"), 200),
        (format!("/{hostile}"), 404),
        (format!("/login?to={hostile}"), 404),
        ("/jobs?class[$ne]=x".into(), 400),
        ("/jobs?class=%7B%22%24ne%22%3A1%7D".into(), 200),
        ("/jobs?class=a&class=b".into(), 400),
        ("/jobs?group=%00".into(), 200),
        ("/jobs?message=%28%28%28".into(), 200),
        ("/jobs?since=1h&until=2h".into(), 400),
        ("/jobs?state=running&why=done".into(), 400),
        (format!("/jobs?class={}", "x".repeat(20_000)), 200),
        ("/groups/why".into(), 400),
        ("/limits/of".into(), 400),
        (format!("/limits/of?name={hostile}"), 200),
        ("/?period=1y".into(), 400),
        ("/pauses/pause".into(), 403),
        ("/pauses/pause?what=group:g".into(), 403),
        (format!("/events?topic={hostile}"), 400),
        (format!("/graphs/{hostile}"), 400),
        ("/graphs/65a1b2c3d4e5f60718293a4b".into(), 404),
        ("/audit".into(), 403),
        ("/jobs/65a1b2c3d4e5f60718293a4b".into(), 404),
        ("/jobs/65a1b2c3d4e5f60718293a4b/explode".into(), 403),
    ] {
        let (got, page) = api.read(&path).await;
        assert_eq!(got, status, "{path:.100}: {page}");
        is_harmless(&page);
        assert!(!page.contains("href=\"/jobs/"), "no job matches: {path:.100}");
    }
}

#[tokio::test]
async fn jobs_are_listed_by_pages_and_filters() {
    let (database, store) = prepared().await;
    let jobs = (0..120).map(|n| NewJob::of_class(if n < 7 { "a&b" } else { "other" }, doc! {}).after(SOON));
    store.enqueue_many(jobs).await.unwrap();
    let api = Api::serve(&database, &[]).await;
    let (mut found, mut path) = (Vec::new(), "/jobs?state=waiting".to_owned());
    loop {
        let (_, page) = api.read(&path).await;
        found.push(links(&page, "/jobs/").count());
        let Some(next) = page.split("rel=\"next\" ").nth(1) else { break };
        path = links(next, "/jobs?").next().unwrap();
        assert!(path.contains("state=waiting&after="), "{path}");
    }
    assert_eq!(found, [50, 50, 20]);
    let (_, page) = api.read("/jobs?class=a%26b").await;
    assert_eq!(links(&page, "/jobs/").count(), 7);
    let tab = links(&page, "/jobs?state=failed").next().unwrap();
    assert_eq!(tab, "/jobs?state=failed&class=a%26b", "a tab keeps the filter");
    assert!(api.read(&tab).await.1.contains("No job matches."));
}

#[tokio::test(flavor = "multi_thread")]
async fn a_job_tells_its_story_without_what_is_redacted() {
    let (database, store) = prepared().await;
    let system = System::start(&database, Setup::default());
    let done = NewJob::of_class("noop", doc! { "n": 7, "tell": true }).enqueue(&store).await.unwrap().id;
    database.archived(done).await;
    store.set_redaction(&RedactionRule::new("secret", []).unwrap()).await.unwrap();
    let waiting = NewJob::of_class("secret", doc! { "card": "s3cr3t" }).enqueue(&store).await.unwrap().id;
    let api = Api::serve(&database, &[]).await;
    let (_, page) = api.read(&format!("/jobs/{done}")).await;
    for part in
        ["It was enqueued", "It is done", "It was started once.", "succeeded", "<h2>Parameters</h2>", "&#34;n&#34;: 7", "<h2>Result</h2>"]
    {
        assert!(page.contains(part), "{part}: {page}");
    }
    assert!(!page.contains(&format!("/jobs/{done}/retry")), "only an operator changes jobs");
    let (_, page) = api.read(&format!("/jobs/{waiting}")).await;
    assert!(page.contains("Why it waits (no-worker)") && page.contains("[redacted]") && !page.contains("s3cr3t"), "{page}");
    let whole = api.page(Method::GET, &format!("/jobs/{waiting}/json")).send().await.unwrap().text().await.unwrap();
    assert!(whole.contains("[redacted]") && !whole.contains("s3cr3t"), "{whole}");
    system.stop().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn the_whole_is_seen_on_the_overview_and_in_tables() {
    let (database, store) = prepared().await;
    let system = System::start(&database, Setup::default());
    let jobs = (0..5).map(|n| NewJob::of_class("noop", doc! { "n": n }).in_group("busy"));
    store.enqueue_many(jobs).await.unwrap();
    database.until("archived", doc! {}, 5, "all ended").await;
    store.pauses().pause(&Paused::Group("stopped".into()), "ada", Some("holidays")).await.unwrap();
    NewJob::of_class("noop", doc! {}).in_group("stopped").enqueue(&store).await.unwrap();
    store.limits().set("printer", Limit::new(Some(3), None)).await.unwrap();
    store.groups().set_weight("busy", Some(2.5)).await.unwrap();
    let api = Api::serve(&database, &[]).await;
    let expect = async |path: &str, parts: &[&str]| {
        let has_all = async || {
            let (status, page) = api.read(path).await;
            status == 200 && parts.iter().all(|part| page.contains(part))
        };
        wait_until(SOON, &format!("{path} has {parts:?}"), has_all).await;
    };
    expect("/", &["5 done, 0 failed", "class=\"done\"", "class=\"latency p99\"", "paused", "stopped", "leader: "]).await;
    // Its end is written later than those that were read.
    let ended = bson::DateTime::from_millis(bson::DateTime::now().timestamp_millis() - 30_000);
    let late = archived(doc! { "last_execution": { "started_at": ended, "ended_at": ended } });
    database.raw("archived").insert_one(late).bypass_document_validation(true).await.unwrap();
    expect("/", &["5 done, 1 failed"]).await;
    expect("/?period=24h", &["5 done, 1 failed", "<a href=\"/?period=24h\" aria-current=\"true\">"]).await;
    expect("/groups", &["busy", "2.5", "stopped", "paused by ada", "holidays"]).await;
    expect("/groups/why?group=stopped", &["paused", "<td class=\"number\"><bdi>1</bdi></td>"]).await;
    expect("/workers", &["available", "all groups", "noop", " MiB"]).await;
    expect("/cluster", &["leads", "term ", "cleans", "keeps archived jobs: ", "What the doctor has found", "MongoDB"]).await;
    expect("/limits", &["printer", "/limits/of?name=printer", "group:stopped", "holidays"]).await;
    let printing = NewJob::of_class("sleep", doc! { "ms": 600_000 }).limit("printer").enqueue(&store).await.unwrap().id;
    expect("/limits/of?name=printer", &["at most 3 at a time", &format!("href=\"/jobs/{printing}\"")]).await;
    assert!(store.control(false).change(&Change::Cancel, &[printing]).await.is_ok());
    expect("/schedules", &["There are no schedules."]).await;
    let weighted = (0..500).map(|n| doc! { "_id": format!("many-{n:03}"), "weight": 2.5 });
    database.raw("groups").insert_many(weighted).bypass_document_validation(true).await.unwrap();
    expect("/groups", &["The first 500 groups, without the ", "many-497"]).await;
    system.stop().await;
    expect("/cluster", &[">stopped<"]).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn mongodb_that_is_away_is_said_on_a_page() {
    let database = TestDatabase::of_its_own().await;
    recruiter_tests::local::store(&database).await;
    let api = Api::serve(&database, &[]).await;
    let fault = FailPoint::new("recruiter web", &["find", "aggregate", "count"]).error_code(189).arm(database.uri()).await;
    for path in ["/", "/jobs", "/workers"] {
        // The overview may have been read just before.
        let fails = async || Some(api.page(Method::GET, path).send().await.unwrap()).filter(|answered| answered.status() != 200);
        let answered = wait_for(SOON, path, fails).await;
        assert_eq!((answered.status().as_u16(), &answered.headers()[header::RETRY_AFTER]), (503, &"1".parse().unwrap()), "{path}");
        let page = answered.text().await.unwrap();
        assert!(page.contains("Not available now") && page.contains("role=\"alert\""), "{page}");
    }
    drop(fault);
    wait_until(SOON, "it answers again", async || api.read("/jobs").await.0 == 200).await;
}

/// What `recruiter web password` prints about somebody with this password.
fn person(name: &str, role: &str, password: &str) -> String {
    let mut command = Command::new(binary("recruiter"));
    let mut child = command.args(["web", "password", name, "--role", role]).stdin(Stdio::piped()).stdout(Stdio::piped()).spawn().unwrap();
    writeln!(child.stdin.take().unwrap(), "{password}").unwrap();
    let said = child.wait_with_output().unwrap();
    assert!(said.status.success());
    String::from_utf8(said.stdout).unwrap()
}

pub(super) fn people() -> NamedTempFile {
    let file = NamedTempFile::new().unwrap();
    let text = [person("ada lovelace", "operator", "difference engine"), person("bob", "viewer", "only to read")].concat();
    assert!(text.contains("$argon2id$") && !text.contains("engine"), "{text}");
    std::fs::write(file.path(), text).unwrap();
    file
}

/// Sends a form; the status, where it leads, and the cookie that it sets.
async fn send(api: &Api, path: &str, cookie: &str, fields: &[(&str, &str)]) -> (u16, String, String) {
    let request = api.page(Method::POST, path).header(header::COOKIE, cookie).form(fields);
    let answered = request.send().await.unwrap();
    let header = |name| answered.headers().get(name).map(|value: &header::HeaderValue| value.to_str().unwrap().to_owned());
    (answered.status().as_u16(), header(header::LOCATION).unwrap_or_default(), header(header::SET_COOKIE).unwrap_or_default())
}

async fn read(api: &Api, path: &str, cookie: &str) -> (u16, String) {
    text(api.page(Method::GET, path).header(header::COOKIE, cookie)).await
}

/// Logs in, and returns what the browser sends from then on.
async fn log_in(api: &Api, name: &str, password: &str) -> String {
    let (status, _, cookie) = send(api, "/login", "", &[("name", name), ("password", password), ("to", "/")]).await;
    assert_eq!(status, 303);
    cookie.split(';').next().unwrap().to_owned()
}

/// Where the form of a page goes.
fn form(page: &str) -> String {
    page.split("action=\"").nth(1).unwrap().split('"').next().unwrap().replace("&#38;", "&").replace("&amp;", "&")
}

/// What a form of a page has.
async fn csrf(api: &Api, path: &str, cookie: &str) -> String {
    let (_, page) = read(api, path, cookie).await;
    page.split("name=\"csrf\" value=\"").nth(1).unwrap_or_else(|| panic!("{page}")).split('"').next().unwrap().to_owned()
}

#[tokio::test(flavor = "multi_thread")]
async fn people_log_in_and_out_and_cannot_guess() {
    let (database, _store) = prepared().await;
    let file = people();
    let api = Api::serve(&database, &["--tokens", file.path().to_str().unwrap()]).await;
    let answered = api.page(Method::GET, "/jobs?class=a%26b").send().await.unwrap();
    assert_eq!(
        (answered.status().as_u16(), &answered.headers()[header::LOCATION]),
        (303, &"/login?to=%2Fjobs%3Fclass%3Da%2526b".parse().unwrap())
    );
    assert!(api.read("/login?to=%2Fjobs").await.1.contains("value=\"/jobs\""));
    for (name, password) in [("ada lovelace", "wrong"), ("nobody", "difference engine"), ("", ""), ("bob", "difference engine")] {
        let (status, _, cookie) = send(&api, "/login", "", &[("name", name), ("password", password)]).await;
        assert_eq!((status, &*cookie), (403, ""), "{name}");
    }
    let fields = [("name", "ada lovelace"), ("password", "difference engine"), ("to", "//example.org")];
    let (status, to, cookie) = send(&api, "/login", "", &fields).await;
    assert_eq!((status, &*to), (303, "/"), "not to another site");
    assert!(cookie.contains("; HttpOnly; SameSite=Strict") && !cookie.contains("Secure"), "{cookie}");
    let cookie = cookie.split(';').next().unwrap();
    let (status, page) = read(&api, "/jobs", cookie).await;
    assert!(status == 200 && page.contains("ada lovelace") && page.contains("Log out"), "{page}");
    assert_eq!(read(&api, "/jobs", &format!("{cookie}0")).await.0, 303, "another cookie");
    assert_eq!(api.request(Method::GET, "/jobs").header(header::COOKIE, cookie).send().await.unwrap().status(), 401, "the API has tokens");
    assert_eq!(send(&api, "/logout", cookie, &[("csrf", "x")]).await.0, 403);
    let secret = csrf(&api, "/jobs", cookie).await;
    assert_eq!(send(&api, "/logout", cookie, &[("csrf", &secret)]).await.0, 303);
    assert_eq!(read(&api, "/jobs", cookie).await.0, 303, "logged out");
    // Four of the ten attempts were wrong.
    for attempt in 5..=11 {
        let (status, ..) = send(&api, "/login", "", &[("name", &attempt.to_string()), ("password", "guessed")]).await;
        assert_eq!(status, if attempt == 11 { 429 } else { 403 });
    }
    assert_eq!(send(&api, "/login", "", &fields).await.0, 429, "also with the right password");
    let log = api.process.stderr();
    assert!(log.contains("logged in") && !log.contains("difference engine") && !log.contains("guessed"), "{log}");
}

#[tokio::test(flavor = "multi_thread")]
async fn behind_a_proxy_cookies_are_secure_and_clients_are_told_apart() {
    let (database, _store) = prepared().await;
    let file = people();
    let api = Api::serve(&database, &["--tokens", file.path().to_str().unwrap(), "--behind-proxy"]).await;
    let from = async |client: &str, password: &str| {
        let request = api.page(Method::POST, "/login").header("x-forwarded-for", format!("192.0.2.9, {client}"));
        let answered = request.form(&[("name", "bob"), ("password", password)]).send().await.unwrap();
        let cookie = answered.headers().get(header::SET_COOKIE).map(|cookie| cookie.to_str().unwrap().to_owned());
        (answered.status().as_u16(), cookie.unwrap_or_default())
    };
    for attempt in 1..=11 {
        assert_eq!(from("198.51.100.1", "wrong").await.0, if attempt == 11 { 429 } else { 403 });
    }
    let (status, cookie) = from("198.51.100.2", "only to read").await;
    assert!(status == 303 && cookie.starts_with("__Host-") && cookie.ends_with("; Secure"), "{cookie}");
    let ada = log_in(&api, "ada lovelace", "difference engine").await;
    let secret = csrf(&api, "/jobs", &ada).await;
    let request =
        api.page(Method::POST, "/pauses/pause?what=group:g").header(header::COOKIE, &ada).header("x-forwarded-for", "198.51.100.3");
    assert_eq!(request.form(&[("csrf", &*secret)]).send().await.unwrap().status(), 303);
    assert_eq!(database.only("audit", doc! {}).await.get_str("address").unwrap(), "198.51.100.3");
}

#[tokio::test(flavor = "multi_thread")]
async fn an_operator_changes_jobs_and_groups_and_others_do_not() {
    let (database, store) = prepared().await;
    let file = people();
    let failed = archived(doc! {});
    let id = failed.get_object_id("_id").unwrap();
    database.raw("archived").insert_one(failed).bypass_document_validation(true).await.unwrap();
    let waiting = NewJob::of_class("nobody-has-it", doc! {}).after(SOON).enqueue(&store).await.unwrap().id;
    let api = Api::serve(&database, &["--tokens", file.path().to_str().unwrap()]).await;
    let (bob, ada) = (log_in(&api, "bob", "only to read").await, log_in(&api, "ada lovelace", "difference engine").await);
    // Who only reads sees no button, and cannot send its form either.
    let retry = format!("/jobs/{id}/retry");
    assert!(!read(&api, &format!("/jobs/{id}"), &bob).await.1.contains(&retry));
    let (theirs, own) = (csrf(&api, "/jobs", &bob).await, csrf(&api, "/jobs", &ada).await);
    for path in [&*retry, "/pauses/pause?what=group:g"] {
        assert_eq!(read(&api, path, &bob).await.0, 403);
    }
    for (path, secret, cookie) in
        [(&*retry, &theirs, &bob), ("/pauses/pause?what=group:g", &theirs, &bob), (&retry, &theirs, &ada), (&retry, &String::new(), &ada)]
    {
        assert_eq!(send(&api, path, cookie, &[("csrf", secret)]).await.0, 403, "{path}");
    }
    assert_eq!((database.count("scheduled", doc! {}).await, database.count("pauses", doc! {}).await), (1, 0));
    assert!(read(&api, &format!("/jobs/{id}"), &ada).await.1.contains(&retry));
    let (_, asked) = read(&api, &retry, &ada).await;
    assert!(asked.contains("would be enqueued again") && asked.contains("method=\"post\""), "{asked}");
    assert_eq!(database.count("scheduled", doc! {}).await, 1, "it is only asked");
    let (status, to, _) = send(&api, &retry, &ada, &[("csrf", &own)]).await;
    assert_eq!((status, read(&api, &to, &ada).await.0), (303, 200), "to the new job: {to}");
    assert_eq!(send(&api, &retry, &ada, &[("csrf", &own)]).await.0, 409, "two operators at once retry it once");
    assert_eq!(database.count("scheduled", doc! {}).await, 2);
    let (_, asked) = read(&api, &retry, &ada).await;
    assert!(asked.contains("Attention") && asked.contains("name=\"again\""), "{asked}");
    let cancel = format!("/jobs/{waiting}/cancel");
    assert!(read(&api, &cancel, &ada).await.1.contains("would be archived as cancelled"));
    assert_eq!(send(&api, &cancel, &ada, &[("csrf", &own)]).await.0, 303);
    assert_eq!(send(&api, &cancel, &ada, &[("csrf", &own)]).await.0, 409, "it has ended");
    let (status, to, _) = send(&api, &format!("/jobs/{waiting}/delete"), &ada, &[("csrf", &own)]).await;
    assert_eq!((status, &*to, database.count("archived", doc! { "_id": waiting }).await), (303, "/jobs", 0));
    assert_eq!(send(&api, "/pauses/pause?what=group:g", &ada, &[("csrf", &own), ("reason", "a reason")]).await.0, 303);
    let pause = database.only("pauses", doc! {}).await;
    assert_eq!(["by", "reason"].map(|field| pause.get_str(field).unwrap()), ["ada lovelace@127.0.0.1", "a reason"]);
    assert!(read(&api, "/groups", &ada).await.1.contains("/pauses/resume?what=group%3Ag"));
    assert_eq!(send(&api, "/pauses/resume?what=group:g", &ada, &[("csrf", &own)]).await.0, 303);
    assert_eq!(database.count("pauses", doc! {}).await, 0);
    let audit = database.all("audit", doc! {}).await;
    let noted = audit.iter().map(|entry| {
        assert_eq!(["caller", "address"].map(|field| entry.get_str(field).unwrap()), ["ada lovelace", "127.0.0.1"]);
        let outcome = entry.get_document("outcome").unwrap();
        let word = outcome.get_str("outcome").map_or_else(|_| outcome.get_i32("status").unwrap().to_string(), str::to_owned);
        format!("{} {word}", entry.get_str("action").unwrap())
    });
    let expected = [
        "jobs.retry enqueued-again",
        "jobs.retry 409",
        "jobs.cancel cancelled",
        "jobs.cancel 409",
        "jobs.delete deleted",
        "pauses.add paused",
        "pauses.remove resumed",
    ];
    assert_eq!(noted.collect::<Vec<_>>(), expected, "what was only asked, and what others wanted, is not there");
}

#[tokio::test(flavor = "multi_thread")]
async fn whatever_is_done_is_done_by_operators() {
    let (database, store) = prepared().await;
    let file = people();
    let job = NewJob::of_class("c", doc! {}).after(SOON).enqueue(&store).await.unwrap().id;
    let api = Api::serve(&database, &["--tokens", file.path().to_str().unwrap()]).await;
    let bob = log_in(&api, "bob", "only to read").await;
    let csrf = csrf(&api, "/jobs", &bob).await;
    for path in [
        format!("/jobs/{job}/cancel"),
        format!("/jobs/many/cancel?id={job}&asked=2100-01-01T00:00:00Z"),
        format!("/graphs/{job}/cancel"),
        "/pauses/pause?what=everything".into(),
        "/schedules/run?name=a".into(),
        format!("/workers/{job}/stop"),
    ] {
        let (status, page) = read(&api, &path, &bob).await;
        assert!(status == 403 && page.contains("needs the role operator"), "{path}: {page}");
        assert_eq!(send(&api, &path, &bob, &[("csrf", &csrf)]).await.0, 403, "{path}");
    }
    let (status, page) = read(&api, "/audit", &bob).await;
    assert!(status == 403 && !read(&api, "/jobs", &bob).await.1.contains("href=\"/audit\""), "{page}");
    assert_eq!(database.count("audit", doc! {}).await, 0);
}

#[tokio::test]
async fn who_logs_in_may_use_any_name_of_the_server() {
    let (database, _store) = prepared().await;
    let file = people();
    let api = Api::serve(&database, &["--tokens", file.path().to_str().unwrap(), "--anonymous", "viewer"]).await;
    let ada = log_in(&api, "ada lovelace", "difference engine").await;
    let jobs = |cookie: &str| text(api.page(Method::GET, "/jobs").header(header::HOST, "jobs.example.org").header(header::COOKIE, cookie));
    assert_eq!(jobs("").await.0, 303, "a foreign name may lead to this machine");
    let (status, page) = jobs(&ada).await;
    assert!(status == 200 && page.contains("ada lovelace"), "{page}");
}

#[tokio::test(flavor = "multi_thread")]
async fn a_retried_job_may_get_other_parameters() {
    let (database, store) = prepared().await;
    store.set_redaction(&RedactionRule::new("c", ["card".to_owned()]).unwrap()).await.unwrap();
    let failed = archived(doc! { "workable": { "class": "c", "parameters": { "card": "s3cr3t", "a": { "b": 1, "c": 2 }, "d": 3 } } });
    let id = failed.get_object_id("_id").unwrap();
    database.raw("archived").insert_one(failed).bypass_document_validation(true).await.unwrap();
    let api = Api::serve(&database, &["--anonymous", "operator"]).await;
    let path = format!("/jobs/{id}/retry");
    let (_, asked) = api.read(&path).await;
    assert!(asked.contains("<textarea name=\"parameters\"") && asked.contains("[redacted]") && !asked.contains("s3cr3t"), "{asked}");
    let csrf = csrf(&api, &path, "").await;
    for (field, value) in [("parameters", "{ typed"), ("parameters", "[17]"), ("priority", "ten"), ("priority", "10")] {
        let sent = [("csrf", &*csrf), (field, value), ("group", "kept <b>")];
        let (status, again) = text(api.page(Method::POST, &path).form(&sent)).await;
        assert!([400, 422].contains(&status), "{field} {value}: {status}");
        assert!(again.contains("role=\"alert\"") && again.contains(value) && again.contains("value=\"kept &#60;b&#62;\""), "{again}");
    }
    assert_eq!(database.count("scheduled", doc! {}).await, 0, "nothing of this was done");
    for hidden in [r#"{"other": "[redacted]"}"#, r#"{"card": ["[redacted]", 1]}"#] {
        let (status, ..) = send(&api, &path, "", &[("csrf", &csrf), ("parameters", hidden)]).await;
        assert_eq!((status, database.count("scheduled", doc! {}).await), (400, 0), "{hidden}");
    }
    let parameters = r#"{"card": "[redacted]", "a": {"c": null}, "new": {"$date": "2030-01-31T18:00:00Z"}}"#;
    let fields = [("csrf", &*csrf), ("parameters", parameters), ("group", "other"), ("priority", "9")];
    assert_eq!(send(&api, &path, "", &fields).await.0, 303);
    let new = database.only("scheduled", doc! {}).await;
    let date = bson::DateTime::parse_rfc3339_str("2030-01-31T18:00:00Z").unwrap();
    let expected = doc! { "card": "s3cr3t", "a": { "c": Bson::Null }, "new": date };
    assert_eq!(new.get_document("workable").unwrap().get_document("parameters").unwrap(), &expected, "what is hidden stays");
    assert_eq!((new.get_str("group").unwrap(), new.get_i32("priority").unwrap()), ("other", 9));
    let (_, asked) = api.read(&path).await;
    let retried = new.get_object_id("_id").unwrap().to_hex();
    assert!(asked.contains(&format!("name=\"again\" value=\"{retried}\"")), "{asked}");
    for (again, status) in [("true", 409), (&*retried, 303), (&*retried, 409)] {
        assert_eq!(send(&api, &path, "", &[("csrf", &csrf), ("again", again)]).await.0, status, "a form that is sent twice: {again}");
    }
    assert_eq!(database.count("scheduled", doc! {}).await, 2);
    let noted: Vec<Document> = database.all("audit", doc! { "outcome.outcome": "enqueued-again" }).await;
    let noted: Vec<&Document> = noted.iter().map(|entry| entry.get_document("target").unwrap()).collect();
    let first = doc! { "job": id.to_string(), "set": ["a", "d", "new"], "group": "other", "priority": "9" };
    assert_eq!(noted, [&first, &doc! { "job": id.to_string(), "again": true }], "without values, which may be secret");
}

#[tokio::test(flavor = "multi_thread")]
async fn jobs_that_wait_get_other_values() {
    let (database, store) = prepared().await;
    let mut ids = Vec::new();
    for _ in 0..3 {
        ids.push(NewJob::of_class("c", doc! {}).in_group("a").after(SOON).enqueue(&store).await.unwrap().id);
    }
    let ended = archived(doc! {});
    let ended_id = ended.get_object_id("_id").unwrap();
    database.raw("archived").insert_one(ended).bypass_document_validation(true).await.unwrap();
    let api = Api::serve(&database, &["--anonymous", "operator"]).await;
    let path = format!("/jobs/{}/change", ids[0]);
    assert!(links(&api.read(&format!("/jobs/{}", ids[0])).await.1, &path).next().is_some());
    let (_, asked) = api.read(&path).await;
    assert!(asked.contains("would be changed") && asked.contains("name=\"group\" value=\"a\""), "{asked}");
    let csrf = csrf(&api, &path, "").await;
    for (field, value) in [("group", "a"), ("priority", "10"), ("due", "noon"), ("due", "9999-12-31T23:59:59Z and more")] {
        let (status, ..) = send(&api, &path, "", &[("csrf", &csrf), (field, value)]).await;
        assert!([400, 422].contains(&status), "{field} {value}: {status}");
    }
    let values = [("csrf", &*csrf), ("group", "b"), ("priority", "9"), ("due", "2030-01-31T18:00:00Z")];
    assert_eq!(send(&api, &path, "", &values).await.0, 303);
    // What the form had is not changed again.
    let values = [("csrf", &*csrf), ("group", "b"), ("priority", "9"), ("due", "90m")];
    assert_eq!(send(&api, &path, "", &values).await.0, 303);
    let job = database.only("scheduled", doc! { "_id": ids[0] }).await;
    assert_eq!((job.get_str("group").unwrap(), job.get_i32("priority").unwrap()), ("b", 9));
    let noted = database.all("audit", doc! { "outcome.outcome": "changed" }).await;
    let noted: Vec<Vec<&String>> = noted.iter().map(|entry| entry.get_document("target").unwrap().keys().collect()).collect();
    assert_eq!(noted, [vec!["job", "priority", "group", "scheduled_at"], vec!["job", "scheduled_at"]]);
    let (_, asked) = api.read(&format!("/jobs/many/change?id={}&id={}&id={ended_id}", ids[1], ids[2])).await;
    assert!(asked.contains("2 changed") && asked.contains("1 refused"), "{asked}");
    assert_eq!(send(&api, &form(&asked), "", &[("csrf", &csrf)]).await.0, 422, "nothing is to be changed");
    let wrong = [("csrf", &*csrf), ("priority", "70"), ("group", "kept")];
    let (status, again) = text(api.page(Method::POST, &form(&asked)).form(&wrong)).await;
    assert!(
        status == 400 && again.contains("value=\"70\"") && again.contains("value=\"kept\"") && again.contains("from 0 to 9"),
        "{again}"
    );
    assert_eq!(send(&api, &form(&again), "", &[("csrf", &csrf), ("priority", "7")]).await.0, 303);
    assert_eq!(database.count("scheduled", doc! { "priority": 7, "group": "a" }).await, 2);
    assert_eq!(api.read(&format!("/jobs/{ended_id}/change")).await.0, 409);
}

#[tokio::test(flavor = "multi_thread")]
async fn many_jobs_are_changed_after_their_number_was_shown() {
    let (database, store) = prepared().await;
    let all: Vec<Document> = (0..5).map(|n| archived(doc! { "group": if n < 3 { "a&b" } else { "other" } })).collect();
    let ids: Vec<ObjectId> = all.iter().map(|job| job.get_object_id("_id").unwrap()).collect();
    database.raw("archived").insert_many(all).bypass_document_validation(true).await.unwrap();
    let waiting = NewJob::of_class("c", doc! {}).after(SOON).enqueue(&store).await.unwrap().id;
    let api = Api::serve(&database, &["--anonymous", "operator"]).await;
    let (_, page) = api.read("/jobs?state=failed&group=a%26b").await;
    let path = links(&page, "/jobs/many/retry").next().unwrap();
    let (_, asked) = api.read(&path).await;
    assert!(asked.contains("Retry: 3 jobs?") && asked.contains("3 enqueued-again"), "{asked}");
    let csrf = csrf(&api, &path, "").await;
    assert_eq!((database.count("scheduled", doc! {}).await, database.count("audit", doc! {}).await), (1, 0), "it is only asked");
    let later = bson::DateTime::parse_rfc3339_str("2100-01-01T00:00:00Z").unwrap();
    let newer = archived(doc! { "group": "a&b", "last_execution": { "started_at": later, "ended_at": later } });
    database.raw("archived").insert_one(newer).bypass_document_validation(true).await.unwrap();
    assert_eq!(send(&api, &form(&asked), "", &[("csrf", "")]).await.0, 403);
    assert_eq!(send(&api, &path, "", &[("csrf", &csrf)]).await.0, 400, "it is not said of when the number was");
    let (status, to, _) = send(&api, &form(&asked), "", &[("csrf", &csrf)]).await;
    assert_eq!((status, &*to), (303, "/audit"));
    assert_eq!(database.count("scheduled", doc! { "group": "a&b" }).await, 3, "not the one that has failed since then");
    let (_, asked) = api.read(&format!("/jobs/many/delete?id={}&id={}", ids[3], ids[4])).await;
    assert!(asked.contains("2 deleted"), "{asked}");
    assert_eq!(send(&api, &form(&asked), "", &[("csrf", &csrf)]).await.0, 303);
    assert_eq!(database.count("archived", doc! {}).await, 4);
    assert!(api.read("/jobs/many/delete").await.1.contains("Choose a job first."));
    let (_, asked) = api.read(&format!("/jobs/many/cancel?id={waiting}&id=65a1b2c3d4e5f60718293a4b")).await;
    assert_eq!(send(&api, &form(&asked), "", &[("csrf", &csrf)]).await.0, 303);
    let noted = database.only("audit", doc! { "action": "jobs.cancel" }).await;
    assert_eq!(noted.get_document("outcome").unwrap(), &doc! { "matched": 2_i64, "outcomes": { "cancelled": 1, "refused": 1 } });
    let noted = database.only("audit", doc! { "action": "jobs.retry" }).await;
    assert_eq!(noted.get_document("target").unwrap().get_document("filter").unwrap(), &doc! { "state": "failed", "group": "a&b" });
    for (path, status) in [
        ("/jobs/many/retry?asked=noon".to_owned(), 400),
        ("/jobs/many/explode?state=failed".into(), 404),
        (format!("/jobs/many/retry?id={}&state=failed", ids[0]), 400),
        (format!("/jobs/many/retry?{}", format!("id={}&", ids[0]).repeat(1_001)), 400),
    ] {
        let asked = if path.contains('?') { format!("{path}&asked=2030-01-31T18:00:00Z") } else { path };
        assert_eq!(send(&api, &asked, "", &[("csrf", &csrf)]).await.0, status, "{asked:.80}");
    }
    let (_, page) = api.read("/audit").await;
    assert!(page.contains("jobs.retry") && page.contains("matched 3") && page.contains("127.0.0.1"), "{page}");
}

#[tokio::test(flavor = "multi_thread")]
async fn a_graph_is_drawn_and_changed() {
    let (database, store) = prepared().await;
    let mut graph = Graph::new();
    let job = |class: &str| NewJob::of_class(class, doc! {}).after(SOON);
    let first = graph.add(job("fetch"));
    let (left, right) = (graph.add(job("left").waits_for(first)), graph.add(job("right").waits_for(first)));
    graph.add(job("last").waits_for(left).waits_for(right));
    let id = graph.id();
    graph.enqueue(&store).await.unwrap();
    let api = Api::serve(&database, &["--anonymous", "operator"]).await;
    let (_, page) = api.read(&format!("/graphs/{id}")).await;
    let (nodes, edges) = (page.matches("<rect class=\"node plain\"").count(), page.matches("<path class=\"edge\"").count());
    assert_eq!((nodes, edges), (4, 4), "{page}");
    assert!(page.contains("1 postponed, 3 waits") || page.contains("4 jobs: "), "{page}");
    assert!(page.contains("x=\"1\" y=\"1\"") && page.contains("x=\"421\" y=\"1\""), "the last one is in the third column: {page}");
    let path = format!("/graphs/{id}/cancel");
    assert!(api.read(&path).await.1.contains("4 jobs that are not finished"));
    let csrf = csrf(&api, &path, "").await;
    assert_eq!(send(&api, &path, "", &[("csrf", &csrf)]).await.0, 303);
    assert_eq!(database.count("archived", doc! { "why": "cancelled" }).await, 4);
    assert_eq!(api.read(&path).await.0, 409);
    assert!(api.read(&format!("/graphs/{id}/retry")).await.1.contains("4 jobs that failed"));
    assert_eq!(send(&api, &format!("/graphs/{id}/retry"), "", &[("csrf", &csrf)]).await.0, 303);
    assert_eq!(database.count("scheduled", doc! {}).await, 4);
    let done = database.all("audit", doc! {}).await;
    let done: Vec<&str> = done.iter().map(|entry| entry.get_str("action").unwrap()).collect();
    assert_eq!(done, ["graphs.cancel", "graphs.retry"]);
}

#[tokio::test(flavor = "multi_thread")]
async fn schedules_and_lines_are_paused_resumed_and_run() {
    let (database, store) = prepared().await;
    let nightly = Schedule::cron("0 3 * * *", "UTC").unwrap().job(NewJob::of_class("c", doc! {}));
    store.schedules().declare("a&b", &nightly).await.unwrap();
    store.pauses().pause(&Paused::Line("l".into()), "ada", None).await.unwrap();
    let api = Api::serve(&database, &["--anonymous", "operator"]).await;
    let (_, page) = api.read("/schedules").await;
    let [run, pause] = ["/schedules/run", "/schedules/pause"].map(|begin| links(&page, begin).next().unwrap());
    let csrf = csrf(&api, &pause, "").await;
    let (status, to, _) = send(&api, &run, "", &[("csrf", &csrf)]).await;
    assert_eq!((status, api.read(&to).await.0), (303, 200), "to the job: {to}");
    assert_eq!(database.count("scheduled", doc! { "schedule.name": "a&b" }).await, 1);
    assert_eq!(send(&api, &pause, "", &[("csrf", &csrf), ("reason", "holidays")]).await.0, 303);
    let (_, page) = api.read("/schedules").await;
    assert!(page.contains("holidays"), "{page}");
    let resume = links(&page, "/schedules/resume").next().unwrap();
    assert_eq!(send(&api, &resume, "", &[("csrf", &csrf)]).await.0, 303);
    assert!(!api.read("/schedules").await.1.contains("holidays"));
    assert_eq!(send(&api, "/schedules/run?name=none", "", &[("csrf", &csrf)]).await.0, 404);
    let line = links(&api.read("/limits").await.1, "/pauses/resume").next().unwrap();
    assert_eq!(send(&api, &line, "", &[("csrf", &csrf)]).await.0, 303);
    assert_eq!(database.count("pauses", doc! {}).await, 0);
}

#[tokio::test(flavor = "multi_thread")]
async fn a_page_gets_the_events_of_its_job_from_this_program_only_for_who_may_read() {
    let (database, store) = prepared().await;
    let file = people();
    let api = Api::serve(&database, &["--tokens", file.path().to_str().unwrap()]).await;
    assert_eq!(api.page(Method::GET, "/events/stream").send().await.unwrap().status(), 303, "who is not logged in reads nothing");
    let bob = log_in(&api, "bob", "only to read").await;
    let job = |class| NewJob::of_class(class, doc! {}).after(SOON).enqueue(&store);
    let (one, other) = (job("one").await.unwrap().id, job("other").await.unwrap().id);
    let (_, page) = read(&api, &format!("/jobs/{one}"), &bob).await;
    let path = page.split("data-live=\"").nth(1).unwrap().split('"').next().unwrap();
    assert_eq!(path, format!("/events/stream?job={one}"));
    let request = api.page(Method::GET, path).header(header::COOKIE, &bob);
    let mut stream = Api::stream(request).await;
    let cancel =
        async |id| super::usual_settings::run("recruiter", &["jobs", "cancel", &format!("{id}")], &[("MONGODB_URI", database.uri())]);
    // Events begin within a second after the subscription: of further jobs, until one comes.
    assert_eq!(cancel(other).await.code, 0);
    pause(Duration::from_secs(2)).await;
    assert_eq!(cancel(one).await.code, 0);
    let told = stream.data().await.unwrap();
    assert_eq!(
        (told.data["job"]["$oid"].as_str().unwrap(), told.data["topic"].as_str().unwrap()),
        (&*one.to_string(), "job.cancelled.one")
    );
    let (_, page) = read(&api, &format!("/jobs/{one}"), &bob).await;
    assert!(!page.contains("data-live"), "nothing more will happen: {page}");
    let many = format!("/events/stream?{}", format!("job={one}&").repeat(101));
    assert_eq!(read(&api, &many, &bob).await.0, 400);
    // A stream ends with the session of its reader.
    let csrf = csrf(&api, "/jobs", &bob).await;
    assert_eq!(send(&api, "/logout", &bob, &[("csrf", &csrf)]).await.0, 303);
    let ended = tokio::time::timeout(SOON, async { while stream.next().await.is_some() {} }).await;
    assert!(ended.is_ok(), "it goes on");
}

#[tokio::test(flavor = "multi_thread")]
async fn an_operator_quiets_a_worker() {
    let (database, _store) = prepared().await;
    let system = System::start(&database, Setup::default());
    let api = Api::serve(&database, &["--anonymous", "operator"]).await;
    let quiet = async || links(&api.read("/workers").await.1, "/workers/").find(|link| link.ends_with("/quiet")).is_some();
    wait_until(SOON, "it registers", quiet).await;
    let path = links(&api.read("/workers").await.1, "/workers/").find(|link| link.ends_with("/quiet")).unwrap();
    let (_, asked) = api.read(&path).await;
    assert!(asked.contains("would be made quiet"), "{asked}");
    let secret = csrf(&api, &path, "").await;
    assert_eq!(send(&api, &path, "", &[("csrf", "")]).await.0, 403);
    assert_eq!(send(&api, &path, "", &[("csrf", &secret)]).await.0, 303);
    database.until("roster", doc! { "wanted": "quiet" }, 1, "it is wanted").await;
    assert!(links(&api.read("/workers").await.1, "/workers/").any(|link| link.ends_with("/resume")));
    let entry = database.only("audit", doc! { "action": "workers.quiet", "outcome.matched": 1_i64 }).await;
    assert_eq!((entry.get_str("caller").ok(), entry.get_str("address").unwrap()), (None, "127.0.0.1"), "nobody has a name here");
    let gone = api.read(&path.replace(&path[9..33], "65a1b2c3d4e5f60718293a4b")).await;
    assert!(gone.0 == 409 && gone.1.contains("no living worker"), "{gone:?}");
    system.stop().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn what_the_audit_cannot_have_is_not_done() {
    let database = TestDatabase::of_its_own().await;
    recruiter_tests::local::store(&database).await;
    let job = archived(doc! {});
    let id = job.get_object_id("_id").unwrap();
    database.raw("archived").insert_one(job).bypass_document_validation(true).await.unwrap();
    let api = Api::serve(&database, &["--anonymous", "operator"]).await;
    let secret = csrf(&api, &format!("/jobs/{id}/delete"), "").await;
    let sent = [("csrf", &*secret)];
    let fault = FailPoint::new("recruiter web", &["insert"]).error_code(189).arm(database.uri()).await;
    for path in [&*format!("/jobs/{id}/delete"), "/pauses/pause?what=group:g"] {
        assert_eq!(send(&api, path, "", &sent).await.0, 503, "{path}");
    }
    drop(fault);
    assert_eq!((database.count("archived", doc! {}).await, database.count("pauses", doc! {}).await), (1, 0));
    assert_eq!(send(&api, "/pauses/pause?what=group:g", "", &sent).await.0, 303);
}

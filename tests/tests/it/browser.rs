//! The pages in a real browser: an operator's walk through all of them, on a desk and on a phone, by day and by night; and without scripts.

use std::{cell::RefCell, env, fs, path::Path, time::Duration};

use bson::{DateTime, Document, doc};
use nix::unistd::gethostname;
use recruiter_common::{Graph, GraphId, JobId, Limit, NewJob, limits::Paused, schedules::Schedule, store::Store};
use recruiter_tests::{
    browser::{Browser, Look, Scripts},
    http::Api,
    local::prepared,
    mongo::TestDatabase,
    processes::{Setup, System},
    wait::{SOON, wait_until},
};
use serde_json::json;
use tempfile::{NamedTempFile, TempDir};

use super::pages::{archived, people};

/// Sends an invoice when the test opens the gate, a file. It refuses an address without `@`.
const SEND: &str = r#"case "$1" in *@*) ;; *) echo "error-class: SmtpRejected" >&3; echo "550 no such mailbox: $1" >&2; exit 1 ;; esac
echo "progress: 40% rendered, now sending" >&3
until [ -e "$0" ]; do sleep 0.1; done
echo '{{"accepted": true, "server": "mx1.example.org"}}'"#;
/// Works until the test opens the gate.
const BUILD: &str = r#"echo "progress: 3/10 sorted" >&3; until [ -e "$0" ]; do sleep 0.1; done"#;
const GROUPS: [(&str, &str); 4] =
    [("mail", "send-invoice"), ("media", "resize-image"), ("reports", "build-report"), ("imports", "import-orders")];

/// A shop with two workers, and `recruiter web` for its people.
struct Shop {
    database: TestDatabase,
    store: Store,
    system: System,
    api: Api,
    directory: TempDir,
    _people: NamedTempFile,
}

impl Shop {
    async fn open() -> Self {
        let ((database, store), directory) = (prepared().await, tempfile::tempdir().unwrap());
        let of_class = |name: &str, command: serde_json::Value| format!("[workables.{name}]\ncommand = {command}\nmessages = \"fd\"\n");
        let gate = |name: &str| directory.path().join(name);
        let workables = [
            of_class("send-invoice", json!(["sh", "-c", SEND, gate("sent"), "{to}"])),
            of_class("build-report", json!(["sh", "-c", BUILD, gate("built")])),
            of_class("import-orders", json!(["true"])),
            of_class("resize-image", json!(["true"])),
        ];
        let config = directory.path().join("workables.toml");
        fs::write(&config, workables.concat()).unwrap();
        let worker = ["--config", config.to_str().unwrap(), "--concurrency", "4"];
        let system = System::start(&database, Setup { workers: 2, worker: &worker, ..Setup::default() });
        let people = people();
        let api = Api::serve(&database, &["--tokens", people.path().to_str().unwrap()]).await;
        Self { database, store, system, api, directory, _people: people }
    }

    fn pass(&self, gate: &str) {
        fs::write(self.directory.path().join(gate), "").unwrap();
    }

    async fn enqueue(&self, jobs: impl IntoIterator<Item = NewJob>) -> Vec<JobId> {
        self.store.enqueue_many(jobs).await.unwrap().into_iter().map(|enqueued| enqueued.id).collect()
    }

    /// An invoice that cannot be sent, when it has failed.
    async fn failed_invoice(&self) -> JobId {
        let job = NewJob::of_class("send-invoice", doc! { "invoice": 4711, "to": "ada.example.org", "language": "en" });
        let id = self.enqueue([job.in_group("mail").tag("billing").urn("invoice:4711")]).await[0];
        assert_eq!(self.database.archived(id).await.get_str("why").unwrap(), "not-scheduled-by-retry-policy");
        id
    }

    /// What it has done within the last hour, what it does, and what is declared.
    async fn fill(&self) {
        self.database.raw("archived").insert_many(past()).bypass_document_validation(true).await.unwrap();
        self.store.limits().set("smtp", Limit::new(Some(20), None)).await.unwrap();
        for (group, weight) in [("mail", 3.0), ("media", 1.5)] {
            self.store.groups().set_weight(group, Some(weight)).await.unwrap();
        }
        self.store.pauses().pause(&Paused::Line("customer 17".into()), "bob", Some("asked to wait")).await.unwrap();
        let nightly = Schedule::cron("0 3 * * *", "Europe/Berlin").unwrap();
        let nightly = nightly.job(NewJob::of_class("build-report", doc! { "kind": "sales" }).in_group("reports"));
        self.store.schedules().declare("nightly-sales", &nightly).await.unwrap();
        let reports = (1..=3).map(|month| NewJob::of_class("build-report", doc! { "month": month }).in_group("reports"));
        let later = NewJob::of_class("import-orders", doc! { "from": "eu" }).in_group("imports").after(Duration::from_secs(7_200));
        self.enqueue(reports.chain([later])).await;
        self.database.until("scheduled", doc! { "locked": true, "progress": { "$exists": true } }, 3, "the reports are being built").await;
    }

    /// Orders and customers are imported for a report, for which two jobs wait.
    async fn graph(&self) -> GraphId {
        let mut graph = Graph::new();
        let import = |from: &str| NewJob::of_class("import-orders", doc! { "from": from }).in_group("imports");
        let imports = ["eu", "us"].map(|from| graph.add(import(from)));
        let report = graph.when_all(imports, NewJob::of_class("build-report", doc! { "kind": "revenue" }).in_group("reports"));
        let invoice = NewJob::of_class("send-invoice", doc! { "to": "boss@example.org" }).in_group("mail");
        let chart = graph.add(NewJob::of_class("resize-image", doc! { "width": 600 }).in_group("media").waits_for(report));
        graph.add(invoice.waits_for(report).waits_for(chart));
        let id = graph.id();
        graph.enqueue(&self.store).await.unwrap();
        self.database
            .until("scheduled", doc! { "graph": id, "locked": true, "workable.class": "build-report" }, 1, "the report is being built")
            .await;
        id
    }
}

/// Jobs that ended within the last hour: more and fewer of them, some late, some failed.
fn past() -> Vec<Document> {
    let (now, host) = (DateTime::now().timestamp_millis(), gethostname().unwrap().into_string().unwrap());
    let minutes =
        (1..59_i64).rev().flat_map(|minute| (0..10 + minute * 7 % 9 + 8 * i64::from(minute % 20 > 11)).map(move |at| (minute, at)));
    let job = |(number, (minute, at)): (i64, (i64, i64))| {
        let ended = now - minute * 60_000 + at * 1_900;
        let started = ended - 30 - number * 13 % 900;
        let due = started - 4 - number * 37 % 45 - if (21..27).contains(&minute) { number * 7 % 160 } else { 0 };
        let [due, started, ended] = [due, started, ended].map(DateTime::from_millis);
        let (group, class) = GROUPS[usize::try_from(number * 5 % 7 % 4).unwrap()];
        let mut execution = doc! { "scheduled_at": due, "started_at": started, "ended_at": ended, "hostname": &host, "pid": 4_120_i64 };
        let is_failed = number % 41 == 7;
        if is_failed {
            execution.extend(doc! { "class": "timeout", "message": "it ran longer than its time limit of 30 s" });
        }
        let (parameters, why) = (doc! { "number": number }, if is_failed { "gave-up" } else { "done" });
        let workable = doc! { "class": class, "parameters": parameters };
        archived(
            doc! { "workable": workable, "group": group, "why": why, "created_at": due, "last_execution": execution, "done": !is_failed },
        )
    };
    (0..).zip(minutes).map(job).collect()
}

/// An operator at a browser, and what is wrong with the pages so far: the test tells all of it at its end.
struct Walk<'a> {
    browser: Browser,
    shop: &'a Shop,
    faults: RefCell<Vec<String>>,
}

impl<'a> Walk<'a> {
    async fn begin(shop: &'a Shop, scripts: Scripts) -> Option<Self> {
        let walk = Self { browser: Browser::open(scripts).await?, shop, faults: RefCell::default() };
        walk.browser.look(Look::ALL[0]).await;
        Some(walk)
    }

    async fn go(&self, path: &str) {
        self.browser.goto(format!("{}{path}", self.shop.api.at)).await.unwrap();
    }

    async fn log_in(&self, password: &str) {
        self.browser.fill("name", "ada lovelace").await;
        self.browser.fill("password", password).await;
        self.browser.click("Log in").await;
    }

    /// Looks at this page from all sides.
    async fn survey(&self, page: &str) {
        let directory = env::var_os("RECRUITER_TEST_SCREENSHOTS");
        for look @ Look { width, scheme } in Look::ALL {
            self.browser.look(look).await;
            let found = [self.browser.misplaced().await, self.browser.violations().await].concat().into_iter();
            self.faults.borrow_mut().extend(found.map(|fault| format!("{page} {width} {scheme}: {fault}")));
            if let Some(directory) = &directory {
                fs::create_dir_all(directory).unwrap();
                self.browser.picture(&Path::new(directory).join(format!("{page}-{width}-{scheme}.png"))).await;
            }
        }
        self.browser.look(Look::ALL[0]).await;
        let complaints = self.browser.complaints().await;
        self.faults.borrow_mut().extend(complaints.into_iter().map(|complaint| format!("{page}: {complaint}")));
    }

    /// As [`Self::survey`], of a page with the status of an error. That the browser complains about.
    async fn survey_error(&self, page: &str, status: u16) {
        let complaints = self.browser.complaints().await;
        assert!(complaints.len() == 1 && complaints[0].contains(&format!("status of {status}")), "{complaints:?}");
        self.survey(page).await;
    }

    async fn logs_in(&self) {
        self.go("/jobs?state=failed").await;
        self.browser.sees("Log in").await;
        self.survey("login").await;
        self.log_in("a guess").await;
        self.browser.sees("The name or the password is wrong.").await;
        self.survey_error("login-wrong", 403).await;
        self.log_in("difference engine").await;
        self.browser.sees("no such mailbox").await;
        self.browser.click("Overview").await;
        self.browser.sees("Latency in the last").await;
        self.survey("overview").await;
    }

    /// Finds the failed job, mends its parameters, retries it, and watches it end on the page that is open.
    async fn retries(&self, failed: JobId) {
        let browser = &self.browser;
        browser.click("Jobs").await;
        browser.sees("import-orders").await;
        self.survey("jobs").await;
        browser.click("Failed").await;
        browser.click("Filter").await;
        browser.fill("class", "send-invoice").await;
        browser.fill("message", "no such mailbox").await;
        browser.click("Apply").await;
        browser.sees("SmtpRejected").await;
        self.survey("jobs-failed").await;
        browser.click(&failed.to_string()).await;
        browser.sees("550 no such mailbox: ada.example.org").await;
        self.survey("job-failed").await;
        browser.click("Retry").await;
        browser.sees("would be enqueued again").await;
        self.survey("job-retry").await;
        browser.fill("parameters", r#"{ "invoice": 4711, "to": "ada@example.org", "language": "en" }"#).await;
        browser.click("Retry").await;
        browser.sees("rendered, now sending").await;
        self.survey("job-running").await;
        browser.execute("window.isSamePage = true", Vec::new()).await.unwrap();
        self.shop.pass("sent");
        browser.sees("It is done").await;
        let is_same = browser.execute("return window.isSamePage === true", Vec::new()).await.unwrap();
        assert!(is_same.convert::<bool>().unwrap(), "the page has followed the job by itself");
        self.survey("job-done").await;
    }

    /// Pauses a group, and sees at a job, in its group and on the overview why it waits.
    async fn pauses(&self) {
        let browser = &self.browser;
        browser.click("Groups").await;
        browser.sees("media").await;
        browser.click_within("//tr[contains(., 'media')]", "Pause").await;
        browser.sees("Its jobs would wait").await;
        browser.fill("reason", "the storage is full").await;
        self.survey("group-pause").await;
        browser.click_within("//main", "Pause").await;
        browser.sees("the storage is full").await;
        let jobs = (0..12).map(|width| NewJob::of_class("resize-image", doc! { "width": width * 100 }).in_group("media"));
        let waits = self.shop.enqueue(jobs).await[0];
        self.go(&format!("/jobs/{waits}")).await;
        browser.sees("Why it waits (paused)").await;
        self.survey("job-waiting").await;
        browser.click("Groups").await;
        // The page shares a reading of the groups with others.
        wait_until(SOON, "the group shows its jobs", async || {
            browser.refresh().await.unwrap();
            browser.source().await.unwrap().contains("<bdi>12</bdi>")
        })
        .await;
        self.survey("groups").await;
        browser.click_within("//tr[contains(., 'media')]", "Why").await;
        browser.sees("Why jobs of media wait").await;
        self.survey("group-why").await;
        browser.click("Overview").await;
        browser.sees("paused").await;
        self.survey("overview-paused").await;
    }

    async fn cancels(&self, graph: GraphId) {
        let browser = &self.browser;
        self.go(&format!("/graphs/{graph}")).await;
        browser.sees("running").await;
        self.survey("graph").await;
        browser.click("Cancel").await;
        browser.sees("3 jobs that are not finished would be cancelled").await;
        self.survey("graph-cancel").await;
        browser.click_within("//main", "Cancel").await;
        browser.sees("3 cancelled").await;
        self.survey("graph-cancelled").await;
    }

    async fn changes_many(&self) {
        let browser = &self.browser;
        self.go("/jobs?state=failed&group=reports").await;
        browser.click_at("//tbody/tr[1]//input").await;
        browser.click_at("//tbody/tr[2]//input").await;
        browser.click("Retry").await;
        browser.sees("2 enqueued-again").await;
        self.survey("jobs-retry").await;
        self.go("/jobs").await;
    }

    async fn reads_the_rest(&self) {
        for (page, text) in
            [("Limits", "smtp"), ("Schedules", "nightly-sales"), ("Audit", "pauses.add"), ("Cluster", "leads"), ("Workers", "send-invoice")]
        {
            self.browser.click(page).await;
            self.browser.sees(text).await;
            self.survey(&page.to_lowercase()).await;
        }
        self.browser.click("Events").await;
        self.browser.sees("Connected").await;
        // Events begin within a second after the subscription: of further jobs, until one comes.
        let shown = async || {
            self.shop.enqueue([NewJob::of_class("import-orders", doc! {}).in_group("imports")]).await;
            self.browser.source().await.unwrap().contains("job.done.import-orders")
        };
        wait_until(SOON, "the events are shown", shown).await;
        self.survey("events").await;
        self.go("/jobs/65a1b2c3d4e5f60718293a4b").await;
        self.browser.sees("No job has the id").await;
        self.survey_error("not-found", 404).await;
    }

    /// The list follows the jobs that run, but not while somebody types; what was chosen and typed stays.
    async fn follows_a_list(&self) {
        let browser = &self.browser;
        self.go("/jobs?group=reports").await;
        browser.sees("running").await;
        browser.click_at("//tbody/tr[1]//input").await;
        browser.fill("class", "build").await;
        let run = async |script: &str| browser.execute(script, Vec::new()).await.unwrap().json().clone();
        run("window.isSamePage = true").await;
        self.shop.pass("built");
        let notice = "return document.querySelector('[data-outdated]').textContent";
        wait_until(SOON, "the page says that it waits", async || run(notice).await.as_str().unwrap().contains("not up to date")).await;
        run("document.activeElement.blur()").await;
        let state = "return [window.isSamePage, document.querySelector('[name=class]').value, document.querySelectorAll('[name=id]:checked').length,
            [...document.querySelectorAll('td .state')].filter((state) => state.textContent === 'running').length,
            document.querySelector('[data-outdated]').textContent]";
        let expected = json!([true, "build", 1, 0, ""]);
        wait_until(SOON, "the list shows that they have ended", async || run(state).await == expected).await;
    }

    async fn stops_a_worker(&self) {
        let browser = &self.browser;
        browser.click("Workers").await;
        browser.sees("available").await;
        assert_eq!(browser.source().await.unwrap().matches(">available</span>").count(), 2);
        browser.click("Stop").await;
        browser.sees("would be stopped").await;
        self.survey("worker-stop").await;
        browser.click_within("//main", "Stop").await;
        let has_left = async || browser.source().await.unwrap().matches(">available</span>").count() == 1;
        wait_until(SOON, "the page shows that the worker has left", has_left).await;
        self.survey("workers-stopped").await;
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn an_operator_works_with_accessible_pages_of_any_width_and_scheme() {
    let mut shop = Shop::open().await;
    let failed = shop.failed_invoice().await;
    shop.fill().await;
    let Some(walk) = Walk::begin(&shop, Scripts::Allowed).await else { return };
    walk.logs_in().await;
    walk.retries(failed).await;
    walk.pauses().await;
    let graph = shop.graph().await;
    walk.cancels(graph).await;
    walk.changes_many().await;
    walk.reads_the_rest().await;
    walk.follows_a_list().await;
    walk.stops_a_worker().await;
    let faults = walk.faults.take();
    drop(walk);
    let ended = async || shop.system.workers.iter_mut().filter_map(|worker| worker.try_exit()).any(|status| status.success());
    wait_until(SOON, "the worker has ended", ended).await;
    shop.system.stop().await;
    assert!(faults.is_empty(), "{} faults:\n{}", faults.len(), faults.join("\n"));
}

#[tokio::test(flavor = "multi_thread")]
async fn an_operator_needs_no_scripts() {
    let shop = Shop::open().await;
    let failed = shop.failed_invoice().await;
    let Some(walk) = Walk::begin(&shop, Scripts::Blocked).await else { return };
    walk.go(&format!("/jobs/{failed}")).await;
    walk.log_in("difference engine").await;
    walk.browser.sees("550 no such mailbox").await;
    for (page, text) in [
        ("Overview", "Latency in the last"),
        ("Groups", "All groups"),
        ("Workers", "available"),
        ("Limits", "Limits"),
        ("Schedules", "There are no schedules"),
        ("Events", "This page needs a script"),
        ("Audit", "Audit"),
        ("Cluster", "leads"),
        ("Jobs", "send-invoice"),
    ] {
        walk.browser.click(page).await;
        walk.browser.sees(text).await;
    }
    walk.browser.click(&failed.to_string()).await;
    walk.browser.click("Retry").await;
    walk.browser.fill("parameters", r#"{ "to": "ada@example.org" }"#).await;
    shop.pass("sent");
    walk.browser.click("Retry").await;
    walk.browser.sees("retry of").await;
    walk.browser.sees_in_the_end("It is done").await;
    assert_eq!(walk.browser.complaints().await, Vec::<String>::new());
    drop(walk);
    shop.system.stop().await;
}

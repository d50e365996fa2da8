//! `recruiter top` in a real terminal: what it shows, what its keys do to a running system, and how it leaves the terminal.

use std::{
    fs::File,
    io::{Read as _, Write as _},
    process::{Child, Command, Stdio},
    sync::{Arc, Mutex},
    thread::JoinHandle,
};

use bson::doc;
use nix::pty::{Winsize, openpty};
use recruiter_common::{DoNotDoItAgain, NewJob, store::RedactionRule};
use recruiter_tests::{
    local::prepared,
    mongo::TestDatabase,
    processes::{Process, Setup, System, binary},
    wait::{SOON, wait_until},
};

/// A terminal of 80 columns and 24 lines, and `recruiter top` in it.
struct Top {
    process: Child,
    keys: File,
    screen: Arc<Mutex<vt100::Parser>>,
    reader: Option<JoinHandle<()>>,
}

impl Top {
    fn start(database: &TestDatabase) -> Self {
        Self::with(database, &[])
    }

    fn with(database: &TestDatabase, flags: &[&str]) -> Self {
        let size = Winsize { ws_row: 24, ws_col: 80, ws_xpixel: 0, ws_ypixel: 0 };
        let terminal = openpty(Some(&size), None).unwrap();
        let other_side = || Stdio::from(terminal.slave.try_clone().unwrap());
        // In a session of its own, whose terminal this is.
        let process = Command::new("setsid")
            .arg("--ctty")
            .arg(binary("recruiter"))
            .args(["top", "--every", "200ms"])
            .args(flags)
            .env("MONGODB_URI", database.uri())
            .env("TERM", "xterm-256color")
            .stdin(other_side())
            .stdout(other_side())
            .stderr(other_side())
            .spawn()
            .unwrap();
        let screen = Arc::new(Mutex::new(vt100::Parser::new(24, 80, 0)));
        let (keys, mut shown, to) = (File::from(terminal.master.try_clone().unwrap()), File::from(terminal.master), screen.clone());
        let reader = std::thread::spawn(move || {
            let mut bytes = [0; 4_096];
            // An error when no process has the terminal any more.
            while let Ok(read @ 1..) = shown.read(&mut bytes) {
                to.lock().unwrap().process(&bytes[..read]);
            }
        });
        Self { process, keys, screen, reader: Some(reader) }
    }

    fn press(&mut self, keys: &str) {
        self.keys.write_all(keys.as_bytes()).unwrap();
    }

    fn shown(&self) -> String {
        self.screen.lock().unwrap().screen().contents()
    }

    /// Waits until a line has all of these texts.
    async fn until(&self, what: &str, texts: &[&str]) {
        let has = |line: &str| texts.iter().all(|text| line.contains(text));
        wait_until(SOON, what, async || {
            let shown = self.shown();
            shown.lines().any(has)
        })
        .await;
    }

    /// Waits until it has ended and all that it has written is on the screen: its exit code.
    async fn end(&mut self) -> Option<i32> {
        wait_until(SOON, "it ends", async || self.process.try_wait().unwrap().is_some()).await;
        self.reader.take().unwrap().join().unwrap();
        self.process.wait().unwrap().code()
    }
}

impl Drop for Top {
    fn drop(&mut self) {
        // It may have ended.
        let _ = self.process.kill();
    }
}

#[tokio::test]
async fn an_operator_sees_the_system_and_acts_on_it_in_a_terminal() {
    let (database, store) = prepared().await;
    let system = System::start(&database, Setup { worker: &["--builtins", "--work-on", "mail"], ..Setup::default() });
    NewJob::of_class("sleep", doc! {}).in_group("untaken").enqueue(&store).await.unwrap();
    let fails =
        NewJob::of_class("fail", doc! { "class": "SmtpDown", "message": "no\u{1b}[2Jroute" }).in_group("mail").retry(&DoNotDoItAgain);
    let failed = fails.enqueue(&store).await.unwrap().id;
    database.archived(failed).await;

    let mut top = Top::start(&database);
    top.until("who leads and who works", &["led by", "1 workers, 0/"]).await;
    top.until("the group that nobody serves", &["untaken", " 1 "]).await;
    top.until("the worker", &["available", "mail"]).await;
    top.until("the failure", &["fail", "mail", "SmtpDown: no\\u{1b}[2Jroute"]).await;
    assert!(top.screen.lock().unwrap().screen().alternate_screen());

    let end = "\u{1b}[F";
    top.press(&format!("{end}p"));
    top.until("the question", &["Pause the group untaken? y: yes"]).await;
    assert_eq!(store.pauses().list().await.unwrap().len(), 0, "only asked");
    top.press("y");
    top.until("the answer", &["paused untaken: its jobs wait"]).await;
    top.until("the pause", &["untaken", "paused"]).await;
    assert_eq!(store.pauses().list().await.unwrap().len(), 1);

    top.press("\tu");
    top.until("the question", &["Quiet the worker"]).await;
    top.press("y");
    top.until("the quiet worker", &["quiet", "mail"]).await;
    top.press("u");
    top.until("the question", &["Resume the worker"]).await;
    top.press("y");
    database.until("roster", doc! { "available": true }, 1, "it takes jobs again").await;

    top.press("\tr");
    top.until("the question", &["Retry the job", &failed.to_string()]).await;
    top.press("y");
    wait_until(SOON, "it is enqueued again, and fails again", async || database.count("archived", doc! {}).await == 2).await;

    top.press("q");
    assert_eq!(top.end().await, Some(0));
    assert!(!top.screen.lock().unwrap().screen().alternate_screen(), "the terminal is as it was");
    system.stop().await;
}

/// Ctrl-C is a key, TERM a signal: after both, the terminal is as it was.
#[tokio::test]
async fn it_leaves_the_terminal_as_it_was_however_it_ends() {
    let (database, _store) = prepared().await;
    for (is_key, code) in [(true, 0), (false, 130)] {
        let mut top = Top::start(&database);
        top.until("who leads", &["NO LEADER: no job starts"]).await;
        if is_key {
            top.press("\u{3}");
        } else {
            let process = nix::unistd::Pid::from_raw(top.process.id().cast_signed());
            nix::sys::signal::kill(process, nix::sys::signal::Signal::SIGTERM).unwrap();
        }
        assert_eq!(top.end().await, Some(code));
        assert!(!top.screen.lock().unwrap().screen().alternate_screen());
        assert!(!top.screen.lock().unwrap().screen().hide_cursor());
    }
}

#[tokio::test]
async fn without_a_terminal_it_says_what_to_use() {
    let mut top = Process::start("recruiter", &["top"], &[("MONGODB_URI", "mongodb://127.0.0.1:1/x")]);
    assert_eq!(top.wait_exit(SOON).await.code(), Some(2));
    assert_eq!(top.stderr().trim_end(), "recruiter: this command needs a terminal; `recruiter stats --json` is for programs");
}

#[tokio::test]
async fn a_redacted_message_is_not_on_the_screen() {
    let (database, store) = prepared().await;
    store.set_redaction(&RedactionRule::new("fail", []).unwrap()).await.unwrap();
    let system = System::start(&database, Setup::default());
    let fails = NewJob::of_class("fail", doc! { "class": "SmtpDown", "message": "to ada" }).retry(&DoNotDoItAgain);
    let failed = fails.enqueue(&store).await.unwrap().id;
    database.archived(failed).await;
    for (flags, message) in [(&[][..], "SmtpDown: [redacted]"), (&["--reveal"], "SmtpDown: to ada")] {
        let mut top = Top::with(&database, flags);
        top.until("the failure", &["fail", "generic", message]).await;
        top.press("q");
        assert_eq!(top.end().await, Some(0));
    }
    system.stop().await;
}

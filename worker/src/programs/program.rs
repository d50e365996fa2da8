//! Runs a job by a program that the workables file names, without a shell.
//!
//! A job chooses arguments, never the program, and one placeholder never becomes two arguments. Every program leads a process group of
//! its own. When an execution must end early, it and all its descendants get TERM, and KILL after `kill_after`. When a program ends by itself and
//! has failed, its descendants are killed. If the worker itself is killed, only its supervisor can end them; systemd does, with `KillMode=mixed`
//! as in our unit and with its default `control-group`.

use std::{
    ffi::OsString,
    fs::File,
    io::{self, Seek as _, Write as _},
    num::NonZeroU32,
    os::fd::OwnedFd,
    pin::{Pin, pin},
    process::Stdio,
    sync::Arc,
    time::{Duration, Instant},
};

use bson::Bson;
use command_fds::{CommandFdExt as _, FdMapping};
use futures_util::{
    FutureExt,
    future::{BoxFuture, FusedFuture, join4},
};
use nix::sys::memfd::{MFdFlags, memfd_create};
use parking_lot::Mutex;
use recruiter_common::{failure::Failure, job, shutdown::pause};
use tokio::{net::unix::pipe, process::Command, time::timeout};

use super::{
    group::{Group, LINGER},
    long_lived::Pool,
    messages::Obeyed,
    output::{Output, TRY_AGAIN},
    settings::{MessagesOn, Settings, prepare},
    stopped_by,
    streams::{StandardError, drain, feed, with_streams},
    template::Template,
};
use crate::{
    cancellation::Cancellation,
    context::Context,
    outcome::{Done, NotDone},
    registry::{Handler, Ready},
};

/// The file descriptor on which a program writes messages, if its class wants that.
const MESSAGES: i32 = 3;
/// The file descriptor from which a program reads its checkpoint, if that is too long for a variable of the environment.
const CHECKPOINT: i32 = 4;
/// Maximum length of a checkpoint in the environment, in bytes. Linux allows 128 KiB for one variable.
const LONGEST_VARIABLE: usize = 64 * 1024;

/// The program of one class.
pub(crate) struct Program {
    /// How many jobs of the class run at a time in this process.
    pub(crate) concurrency: Option<NonZeroU32>,
    /// The defaults of its jobs.
    pub(crate) defaults: job::Settings,
    pub(crate) arguments: Vec<Template>,
    pub(crate) settings: Arc<Settings>,
    /// The processes of a long-lived program.
    pub(crate) pool: Option<Arc<Pool>>,
}

impl Handler for Program {
    fn decode(&self, parameters: Bson) -> Result<Arc<dyn Ready>, Failure> {
        if let Some(pool) = &self.pool {
            let parameters = parameters.into_relaxed_extjson();
            return Ok(Arc::new(Line { parameters, pool: pool.clone(), settings: self.settings.clone() }));
        }
        let arguments = self.arguments.iter().map(|argument| argument.render(&parameters)).collect::<Result<_, _>>()?;
        let input = format!("{}\n", parameters.into_relaxed_extjson()).into_bytes();
        Ok(Arc::new(Invocation { arguments, input, settings: self.settings.clone() }))
    }

    fn stops_within(&self) -> Option<Duration> {
        Some(self.settings.stops_within())
    }
}

/// One execution by a long-lived program.
struct Line {
    parameters: serde_json::Value,
    pool: Arc<Pool>,
    settings: Arc<Settings>,
}

impl Ready for Line {
    fn time_limit(&self) -> Option<Duration> {
        self.settings.time_limit
    }

    fn stops_within(&self) -> Option<Duration> {
        Some(self.settings.stops_within())
    }

    fn execute<'a>(&'a self, job: &'a Arc<Context>) -> BoxFuture<'a, Result<Done, NotDone>> {
        self.pool.run(&self.parameters, &self.settings, job).boxed()
    }
}

/// One execution of a program, ready to start.
struct Invocation {
    arguments: Vec<OsString>,
    input: Vec<u8>,
    settings: Arc<Settings>,
}

impl Ready for Invocation {
    fn time_limit(&self) -> Option<Duration> {
        self.settings.time_limit
    }

    fn stops_within(&self) -> Option<Duration> {
        Some(self.settings.stops_within())
    }

    fn execute<'a>(&'a self, job: &'a Arc<Context>) -> BoxFuture<'a, Result<Done, NotDone>> {
        self.run(job).boxed()
    }
}

impl Invocation {
    async fn run(&self, job: &Context) -> Result<Done, NotDone> {
        let (mut group, messages) = self.start(job).map_err(|error| self.settings.not_started(&error))?;
        let ended = group.ended()?;
        let mut output = Output::up_to(self.settings.result_limit);
        let obeyed = Mutex::new(Obeyed::default());
        let mut errors = StandardError::of(&self.settings, job);
        let stopped = {
            let child = &mut group.leader;
            let (input, from_output, from_errors) = (child.stdin.take(), child.stdout.take(), child.stderr.take());
            let streams = join4(
                feed(input, &self.input),
                drain(from_output, |chunk| output.push(chunk)),
                drain(from_errors, |chunk| errors.push(chunk, &mut obeyed.lock())),
                drain(messages, |chunk| obeyed.lock().push(chunk, job)),
            );
            let (mut streams, mut ended) = (pin!(streams.fuse()), pin!(ended));
            let stopped = tokio::select! {
                biased;
                ended = with_streams(ended.as_mut(), streams.as_mut()) => ended.map(|()| false),
                () = job.cancelled() => Ok(true),
            }?;
            if stopped {
                self.stop(&group, job, ended, streams).await;
            } else {
                let is_open = !streams.is_terminated() && timeout(LINGER, streams).await.is_err();
                if !group.has_succeeded() {
                    // Another attempt must not meet what is left of this one.
                    group.kill_all().await;
                } else if is_open {
                    group.kill();
                }
            }
            stopped
        };
        if stopped {
            // A process that waits for a dead disk survives KILL. The worker does not wait for it.
            let _ = timeout(LINGER, group.leader.wait()).await;
            return Err(stopped_by(job));
        }
        let status = group.leader.wait().await?;
        obeyed.lock().finish(job);
        errors.finish(&mut obeyed.lock());
        let Obeyed { class, give_up, retry_after, .. } = std::mem::take(&mut *obeyed.lock());
        if status.code() == Some(0) {
            return Ok(Done { result: output.into_result(self.settings.keeps_text) });
        }
        let mut failure = errors.errors.into_failure(&self.settings.path, status);
        if let Some(class) = class.filter(|_| status.code() != Some(TRY_AGAIN)) {
            failure.class = class;
        }
        if let Some(reason) = give_up {
            return Err(NotDone::GiveUp(Failure { trace: failure.trace, ..Failure::new(failure.class, reason) }));
        }
        if status.code() == Some(TRY_AGAIN) {
            return Err(self.try_again(failure, retry_after));
        }
        retry_after.into_iter().for_each(|delay| job.retry_after(delay));
        Err(NotDone::Failed(failure))
    }

    /// Starts the program. Also returns the pipe with its messages, if its class wants one.
    fn start(&self, job: &Context) -> io::Result<(Group, Option<pipe::Receiver>)> {
        let mut command = self.command(job);
        let mut descriptors = Vec::new();
        if let Ok(Some(checkpoint)) = job.last_checkpoint::<Bson>() {
            let checkpoint = checkpoint.into_relaxed_extjson().to_string();
            if checkpoint.len() <= LONGEST_VARIABLE {
                command.env("RECRUITER_CHECKPOINT", checkpoint);
            } else {
                descriptors.push(FdMapping { parent_fd: in_memory(checkpoint.as_bytes())?, child_fd: CHECKPOINT });
                command.env("RECRUITER_CHECKPOINT_FD", CHECKPOINT.to_string());
            }
        }
        let messages = match self.settings.messages {
            MessagesOn::Descriptor => {
                let (sender, receiver) = pipe::pipe()?;
                descriptors.push(FdMapping { parent_fd: sender.into_blocking_fd()?, child_fd: MESSAGES });
                command.env("RECRUITER_FD", MESSAGES.to_string());
                Some(receiver)
            }
            MessagesOn::Nothing | MessagesOn::StandardError => None,
        };
        if !descriptors.is_empty() {
            command.fd_mappings(descriptors).map_err(io::Error::other)?;
        }
        Ok((Group::spawn(&mut command)?, messages))
    }

    /// Ends the program and all its descendants by TERM, and by KILL after `kill_after`.
    ///
    /// They get KILL at once when the worker must end at once, or was declared dead: the job may already run elsewhere.
    async fn stop(
        &self,
        group: &Group,
        job: &Context,
        ended: Pin<&mut impl Future<Output = io::Result<()>>>,
        mut streams: Pin<&mut impl FusedFuture>,
    ) {
        if job.cancellation() != Some(Cancellation::ClaimLost) {
            group.terminate_all().await;
            let all_gone = async {
                // After an error the state of the program is unknown: it is killed.
                let gone = with_streams(ended, streams.as_mut()).await;
                if gone.is_ok() && !streams.is_terminated() {
                    streams.await;
                }
            };
            tokio::select! {
                () = all_gone => {}
                () = pause(self.settings.kill_after) => {}
                () = job.cancel.at_once() => {}
            }
        }
        group.kill_all().await;
    }

    /// The outcome of exit code 75: a snooze, up to the limit of the class.
    fn try_again(&self, reason: Failure, asked: Option<Duration>) -> NotDone {
        let Settings { try_again_after, try_again_limit, .. } = *self.settings;
        NotDone::Snooze { after: asked.or(try_again_after), reason, at_most: Some(try_again_limit) }
    }

    fn command(&self, job: &Context) -> Command {
        let mut command = Command::new(&self.settings.path);
        command.args(&self.arguments).stdin(Stdio::piped()).stdout(Stdio::piped()).stderr(Stdio::piped());
        prepare(&mut command, &self.settings.directory, &self.settings.environment);
        command
            .env("RECRUITER_JOB_ID", job.job_id().to_string())
            .env("RECRUITER_JOB_CLASS", job.class())
            .env("RECRUITER_JOB_GROUP", job.group())
            .env("RECRUITER_ATTEMPT", job.attempt().to_string())
            .env("RECRUITER_IS_LAST_ATTEMPT", job.is_last_attempt().to_string());
        if let Some(traceparent) = job.traceparent_of_span() {
            command.env("TRACEPARENT", traceparent);
        }
        if let Some(item) = job.item() {
            command.env("RECRUITER_ITEM", item.index.to_string()).env("RECRUITER_ITEMS", item.of.to_string());
        }
        if let Some(deadline) = job.deadline() {
            let left = deadline.saturating_duration_since(Instant::now());
            command.env("RECRUITER_TIME_LIMIT_MS", left.as_millis().to_string());
        }
        command
    }
}

/// A file without a name that has this content.
fn in_memory(content: &[u8]) -> io::Result<OwnedFd> {
    let mut file = File::from(memfd_create("checkpoint", MFdFlags::MFD_CLOEXEC)?);
    file.write_all(content)?;
    file.rewind()?;
    Ok(file.into())
}

#[cfg(test)]
pub(crate) mod tests {
    use std::{
        collections::BTreeMap,
        ffi::OsStr,
        fs,
        os::unix::ffi::{OsStrExt as _, OsStringExt as _},
        path::Path,
    };

    use bson::{Binary, doc, spec::BinarySubtype};
    use nix::{errno::Errno, sys::signal::Signal, unistd::Pid};
    use recruiter_common::{failure, ids::JobId, job::Job};

    use super::*;
    use crate::deadline::Deadline;

    pub(crate) fn context() -> Arc<Context> {
        context_of_attempt(1)
    }

    pub(crate) fn context_of_attempt(attempt: u32) -> Arc<Context> {
        let job = doc! {
            "_id": JobId::new(),
            "locked": false,
            "group": "generic",
            "workable": { "class": "test" },
            "scheduled_at": bson::DateTime::now(),
            "attempts": attempt,
        };
        Arc::new(Context {
            job: Arc::new(Job::try_from(job).unwrap()),
            store: None,
            start: recruiter_common::ids::StartId::new(),
            is_last_attempt: false,
            last_execution: None,
            item: None,
            deadline: Deadline::default(),
            cancel: Arc::default(),
            ends: None,
            own_end: Arc::default(),
            notes: crate::context::NotesCell::default(),
            retry_after: Default::default(),
        })
    }

    fn program(command: &[&str]) -> Program {
        let settings = Settings {
            path: Path::new("/bin").join(command[0]),
            time_limit: None,
            try_again_after: Some(Duration::from_secs(60)),
            try_again_limit: 3,
            kill_after: Duration::from_secs(5),
            result_limit: 1024 * 1024,
            directory: "/".into(),
            environment: BTreeMap::new(),
            messages: MessagesOn::Nothing,
            log_stderr: false,
            keeps_text: false,
        };
        let arguments = command[1..].iter().map(|argument| Template::parse(argument).unwrap()).collect();
        Program { concurrency: None, defaults: job::Settings::default(), arguments, settings: Arc::new(settings), pool: None }
    }

    fn with(command: &[&str], change: impl FnOnce(&mut Settings)) -> Program {
        let mut program = program(command);
        change(Arc::get_mut(&mut program.settings).unwrap());
        program
    }

    async fn run(program: Program, parameters: impl Into<Bson>) -> Result<Done, NotDone> {
        let invocation = program.decode(parameters.into()).map_err(NotDone::Failed)?;
        // A hang fails the test.
        timeout(Duration::from_secs(300), invocation.execute(&context())).await.expect("it ends")
    }

    /// Runs a shell script.
    async fn sh(script: &str) -> Result<Done, NotDone> {
        // As a parameter, so that its braces are no placeholders.
        run(program(&["sh", "-c", "{script}"]), doc! { "script": script }).await
    }

    fn text(result: Result<Done, NotDone>) -> String {
        match result {
            Ok(Done { result: Some(Bson::String(text)) }) => text,
            other => panic!("no text: {other:?}"),
        }
    }

    fn failed(result: Result<Done, NotDone>) -> Failure {
        match result {
            Err(NotDone::Failed(failure)) => failure,
            other => panic!("no failure: {other:?}"),
        }
    }

    async fn wait_until(what: &str, condition: impl Fn() -> bool) {
        let mut ticks = tokio::time::interval(Duration::from_millis(10));
        for _ in 0..6_000 {
            if condition() {
                return;
            }
            ticks.tick().await;
        }
        panic!("never: {what}");
    }

    /// Whether a process with this id runs. A zombie does not.
    fn is_running(id: &str) -> bool {
        fs::read_to_string(format!("/proc/{}/stat", id.trim())).is_ok_and(|stat| !stat.contains(") Z"))
    }

    #[tokio::test]
    async fn parameters_arrive_verbatim_as_one_argument_each() {
        let hostile = "-n $(touch /tmp/x) `id` \"quoted\" 'single'\n*\t\\ ;|&";
        let result = run(program(&["printf", "[%s]", "{a}", "{a}x", "{b}"]), doc! { "a": hostile, "b": "" }).await;
        assert_eq!(text(result), format!("[{hostile}][{hostile}x][]"));
    }

    #[tokio::test]
    async fn a_file_name_that_is_not_utf8_is_found() {
        let directory = tempfile::tempdir().unwrap();
        let file = directory.path().join(OsStr::from_bytes(b"caf\xe9"));
        fs::write(&file, "found").unwrap();
        let path = Binary { subtype: BinarySubtype::Generic, bytes: file.into_os_string().into_vec() };
        assert_eq!(text(run(program(&["cat", "--", "{path}"]), doc! { "path": path.clone() }).await), "found");
        let sum = run(with(&["sha256sum", "{path}"], |settings| settings.path = "/usr/bin/sha256sum".into()), doc! { "path": path }).await;
        let Ok(Done { result: Some(Bson::Binary(sum)) }) = sum else { panic!("no name that is not UTF-8: {sum:?}") };
        assert!(sum.bytes.starts_with(b"bcc649cfdb8cc557053da67df7e7fcb740dcf7f721cebe1f2082597ad0d5e7d8"));
    }

    #[tokio::test]
    async fn standard_input_is_one_line_of_extended_json() {
        let parameters = doc! { "n": i64::MAX, "at": bson::DateTime::from_millis(0), "text": "two\nlines" };
        let input = text(run(with(&["cat"], |settings| settings.keeps_text = true), parameters.clone()).await);
        assert_eq!(input, r#"{"n":9223372036854775807,"at":{"$date":"1970-01-01T00:00:00Z"},"text":"two\nlines"}"#);
        let back = Bson::try_from(serde_json::from_str::<serde_json::Value>(&input).unwrap()).unwrap();
        assert_eq!(back.as_document().unwrap().get("at"), parameters.get("at"));
    }

    #[tokio::test]
    async fn every_way_to_end_is_told_apart() {
        let check = |result, class: &str, message: &str, trace: Option<&str>| {
            let failure = failed(result);
            assert_eq!((failure.class.as_str(), failure.message.as_str(), failure.trace.as_deref()), (class, message, trace));
        };
        assert_eq!(sh("").await, Ok(Done::default()));
        assert_eq!(sh("echo").await, Ok(Done::default()));
        assert_eq!(text(sh("printf 'a\n\n'; echo noise >&2").await), "a\n");
        assert_eq!(
            sh("printf '\\377'").await.unwrap().result,
            Some(Bson::Binary(Binary { subtype: BinarySubtype::Generic, bytes: vec![255] }))
        );
        check(sh("exit 3").await, "exit:3", "`/bin/sh` exited with 3 without output on standard error", None);
        check(
            sh("echo one >&2; echo ' two ' >&2; echo >&2; exit 1").await,
            "exit:1",
            "`/bin/sh` exited with 1: two",
            Some("one\n two \n\n"),
        );
        check(sh("kill -KILL $$").await, "signal:SIGKILL", "`/bin/sh` was killed by SIGKILL without output on standard error", None);
        check(sh("echo >&2 dying; kill -TERM $$").await, "signal:SIGTERM", "`/bin/sh` was killed by SIGTERM: dying", Some("dying\n"));
        check(sh("kill -40 $$").await, "signal:40", "`/bin/sh` was killed by 40 without output on standard error", None);
        let Err(NotDone::Snooze { after, reason, at_most: Some(3) }) = sh("echo busy >&2; exit 75").await else {
            panic!("not to be tried again")
        };
        assert_eq!(
            (after, reason.class.as_str(), reason.message.as_str()),
            (Some(Duration::from_secs(60)), "exit:75", "`/bin/sh` exited with 75: busy")
        );
    }

    #[tokio::test]
    async fn a_program_can_name_its_error_class() {
        let class = async |script: &str| failed(sh(script).await).class;
        assert_eq!(class("echo 'error-class: first' >&2; echo 'error-class:  not-found ' >&2; exit 2").await, "not-found");
        assert_eq!(class("printf 'error-class: unfinished' >&2; exit 2").await, "unfinished");
        assert_eq!(class("echo 'error-class: crashed' >&2; kill -ABRT $$").await, "crashed");
        assert_eq!(class("echo 'error-class: early' >&2; head -c 1000000 /dev/zero >&2; exit 2").await, "early");
        for not_one in [
            "an error-class: x",
            "error-class:x",
            "error-class: ",
            "Error-Class: x",
            "error-class: a\tb",
            &format!("error-class: {}", "x".repeat(257)),
        ] {
            assert_eq!(class(&format!("echo '{not_one}' >&2; exit 2")).await, "exit:2", "{not_one}");
        }
        assert_eq!(class(&format!("echo 'error-class: {}' >&2; exit 2", "x".repeat(256))).await, "x".repeat(256));
        let failure = failed(sh("echo 'no such thing' >&2; echo 'error-class: absent' >&2; exit 2").await);
        assert_eq!((failure.class.as_str(), failure.message.as_str()), ("absent", "`/bin/sh` exited with 2: no such thing"));
    }

    /// Runs a script whose messages are read from here, and returns its end and its job.
    async fn reporting(messages: MessagesOn, log_stderr: bool, script: &str) -> (Result<Done, NotDone>, Arc<Context>) {
        let change = |settings: &mut Settings| (settings.messages, settings.log_stderr) = (messages, log_stderr);
        let program = with(&["sh", "-c", "{script}"], change);
        let (invocation, job) = (program.decode(bson::bson!({ "script": script })).unwrap(), context());
        let ended = timeout(Duration::from_secs(300), invocation.execute(&job)).await.expect("it ends");
        (ended, job)
    }

    #[tokio::test]
    async fn a_program_reports_on_a_descriptor_of_its_own() {
        let script = "test \"$RECRUITER_FD\" = 3 || exit 9; echo 'progress: 1/4 page 1' >&3; echo 'checkpoint: {\"row\": 7}' >&3
            echo 'log: hello' >&3; echo 'retry-after: 7s' >&3; echo 'error-class: SmtpDown' >&3; echo 'progress: 9/9'; echo 'log: no' >&2; exit 4";
        let (ended, job) = reporting(MessagesOn::Descriptor, false, script).await;
        let failure = failed(ended);
        assert_eq!((failure.class.as_str(), failure.message.as_str()), ("SmtpDown", "`/bin/sh` exited with 4: log: no"));
        assert_eq!(job.last_progress().unwrap().to_string(), "1 of 4 (25 %), page 1");
        assert_eq!((job.last_checkpoint().unwrap(), job.log_lines()), (Some(doc! { "row": 7 }), vec!["hello".to_owned()]));
        assert_eq!(*job.retry_after.lock(), Some(Duration::from_secs(7)));
        let (ended, _) = reporting(MessagesOn::Descriptor, false, "echo 'retry-after: 7s' >&3; exit 75").await;
        assert!(matches!(ended, Err(NotDone::Snooze { after: Some(after), .. }) if after == Duration::from_secs(7)));
        let (ended, _) = reporting(MessagesOn::Descriptor, false, "printf 'give-up: no such file' >&3; exit 2").await;
        assert!(matches!(&ended, Err(NotDone::GiveUp(why)) if why.message == "no such file" && why.class == "exit:2"), "{ended:?}");
        let (ended, _) = reporting(MessagesOn::Descriptor, false, "echo 'give-up: x' >&3; echo done").await;
        assert_eq!(text(ended), "done", "messages about a failure do not matter to a success");
        let (ended, _) = reporting(MessagesOn::Nothing, false, "test -z \"$RECRUITER_FD\" && ! echo x 2> /dev/null >&3").await;
        assert_eq!(ended, Ok(Done::default()), "only if its class wants that");
    }

    #[tokio::test]
    async fn a_program_can_report_on_standard_error() {
        let script = "echo 'a warning: x' >&2; echo 'progress: 50%' >&2; echo 'no such thing' >&2; echo 'log: last' >&2; exit 1";
        let (ended, job) = reporting(MessagesOn::StandardError, true, script).await;
        assert_eq!(failed(ended).message, "`/bin/sh` exited with 1: no such thing", "a message describes no error");
        assert_eq!(job.last_progress().unwrap().to_string(), "50 %");
        assert_eq!(job.log_lines(), ["a warning: x", "no such thing", "last"]);
        let (ended, job) = reporting(MessagesOn::Nothing, true, "echo one >&2; printf two >&2").await;
        assert_eq!((ended, job.log_lines()), (Ok(Done::default()), vec!["one".to_owned(), "two".to_owned()]), "also of a success");
        let (ended, job) = reporting(MessagesOn::Nothing, false, "echo one >&2").await;
        assert_eq!((ended, job.log_lines().len()), (Ok(Done::default()), 0));
    }

    #[tokio::test]
    async fn messages_of_any_content_neither_block_nor_harm() {
        let script = "head -c 3000000 /dev/zero >&3; echo >&3; printf '\\377\\376\\n' >&3; yes rubbish | head -c 100000 >&3
            echo 'checkpoint: {' >&3; echo 'progress: 1/2' >&3; exec 3>&-; echo done";
        let (ended, job) = reporting(MessagesOn::Descriptor, false, script).await;
        assert_eq!((text(ended).as_str(), job.last_progress()), ("done", Some((1, 2).into())));
        let log = job.log_lines();
        assert!(log.len() <= 100 && log.last().unwrap().starts_with("ignored a message: it is not JSON"), "{log:?}");
    }

    #[tokio::test]
    async fn a_program_gets_the_checkpoint_and_no_shell_reads_it() {
        let job = Arc::new(Context::for_tests().checkpoint(doc! { "row": 7, "text": "$(id) `id`" }).build());
        let program = program(&["sh", "-c", "{script}"]);
        let invocation = program.decode(bson::bson!({ "script": "printf %s \"$RECRUITER_CHECKPOINT\"" })).unwrap();
        let ended = invocation.execute(&job).await.unwrap();
        assert_eq!(ended.result, Some(doc! { "row": 7, "text": "$(id) `id`" }.into()), "JSON is stored as such");
    }

    /// Linux starts no program with a variable of more than 128 KiB, and this one has almost 384 KiB.
    #[tokio::test]
    async fn a_long_checkpoint_is_read_from_a_descriptor() {
        let largest = "\u{1}".repeat(recruiter_common::job::notes::LARGEST_CHECKPOINT - 100);
        let job = Arc::new(Context::for_tests().checkpoint(doc! { "text": &largest }).build());
        let program = with(&["sh", "-c", "{script}"], |settings| settings.messages = MessagesOn::Descriptor);
        let script = "test -z \"$RECRUITER_CHECKPOINT\" && echo 'log: x' >&3 && cat <&$RECRUITER_CHECKPOINT_FD";
        let ended = program.decode(bson::bson!({ "script": script })).unwrap().execute(&job).await.unwrap();
        assert_eq!((ended.result, job.log_lines()), (Some(doc! { "text": largest }.into()), vec!["x".to_owned()]));
    }

    /// Descendants that have left its group: one that is still a child of its child, one whose parent has ended, one without its variables.
    #[tokio::test]
    async fn cancellation_ends_descendants_in_sessions_of_their_own() {
        for why in [Cancellation::Requested, Cancellation::ClaimLost] {
            let directory = tempfile::tempdir().unwrap();
            let script = "cd \"$0\"; for n in 1 2 3; do case $n in 3) clean='env -i';; esac; case $n in 2) end=exit;; *) end=wait;; esac
                (setsid $clean sh -c \"trap '' TERM; echo \\$\\$ > pid$n; while :; do sleep 1; done\" > /dev/null 2>&1 & $end) & done
                until test -s pid1 && test -s pid2 && test -s pid3; do sleep 0.1; done";
            ended_by(Duration::from_millis(300), script, directory.path(), |job| job.cancel.cancel(why)).await;
            for n in 1..=3 {
                let pid = fs::read_to_string(directory.path().join(format!("pid{n}"))).unwrap();
                wait_until("it is killed", || !is_running(&pid)).await;
            }
        }
    }

    #[tokio::test]
    async fn a_result_that_is_json_is_stored_as_such() {
        let result = async |script: &str| sh(script).await.unwrap().result;
        assert_eq!(
            result("echo '{\"a\": [1, 2.5, null], \"at\": {\"$date\": \"1970-01-01T00:00:01Z\"}}'").await,
            Some(doc! { "a": [1, 2.5, Bson::Null], "at": bson::DateTime::from_millis(1_000) }.into())
        );
        assert_eq!(result("echo '[1, \"two\"]'").await, Some(vec![Bson::from(1), "two".into()].into()));
        assert_eq!(result(r#"printf '%s' '{"a": "caf\udce9"}'"#).await, Some(doc! { "a": "caf\u{fffd}" }.into()));
        let inexact = "{\"id\": 18446744073709551615}";
        for text in ["007", "true", "null", "\"x\"", "{a}", "[1", "{} {}", "{\"$oid\": 5}", inexact] {
            assert_eq!(result(&format!("echo '{text}'")).await, Some(text.into()), "{text}");
        }
        let deep = format!("{}{}", "[".repeat(5_000), "]".repeat(5_000));
        assert_eq!(result(&format!("echo '{deep}'")).await, Some(deep.into()), "nested too deeply");
        let kept = run(with(&["sh", "-c", "{script}"], |settings| settings.keeps_text = true), doc! { "script": "echo {}" }).await;
        assert_eq!(text(kept), "{}");
    }

    #[tokio::test]
    async fn long_output_is_cut_and_never_blocks() {
        let limited = |limit| with(&["sh", "-c", "{script}"], |settings| settings.result_limit = limit);
        let result =
            text(run(limited(4), doc! { "script": "head -c 3000000 /dev/zero | tr '\\0' x; head -c 3000000 /dev/zero >&2" }).await);
        assert_eq!(result, "xxxx… [cut after 4 bytes]");
        assert_eq!(text(run(limited(4), doc! { "script": "printf 'abcé'" }).await), "abc… [cut after 4 bytes]");
        assert_eq!(text(run(limited(4), doc! { "script": "printf abcd" }).await), "abcd");
        let Ok(Done { result: Some(Bson::Binary(cut)) }) = run(limited(2), doc! { "script": "printf '\\377abc'" }).await else {
            panic!("not binary")
        };
        assert_eq!(cut.bytes, [b"\xffa".as_slice(), "… [cut after 2 bytes]".as_bytes()].concat());
        let failure = failed(sh("yes error | head -c 3000000 >&2; echo last >&2; exit 1").await);
        let trace = failure.trace.unwrap();
        assert!(trace.len() <= failure::LONGEST_TRACE && trace.ends_with("error\nlast\n"), "{trace}");
        assert_eq!(failure.message, "`/bin/sh` exited with 1: last");
    }

    #[tokio::test]
    async fn long_input_may_be_ignored_or_read_late() {
        let script = |script: &str| doc! { "script": script, "ballast": "x".repeat(3_000_000) };
        assert_eq!(run(program(&["sh", "-c", "{script}"]), script("exec <&-; exit 0")).await, Ok(Done::default()));
        assert_eq!(run(program(&["sh", "-c", "{script}"]), script("exit 0")).await, Ok(Done::default()));
        let late = "head -c 1000000 /dev/zero | tr '\\0' x; wc -c";
        assert!(
            text(run(program(&["sh", "-c", "{script}"]), script(late)).await)
                .ends_with(&format!("x{}", script(late).get_str("ballast").unwrap().len() + late.len() + 28))
        );
        let echo = with(&["cat"], |settings| (settings.result_limit, settings.keeps_text) = (4_000_000, true));
        let echoed = run(echo, script("")).await;
        assert_eq!(text(echoed).len(), 3_000_000 + 26);
    }

    #[tokio::test]
    async fn a_program_that_is_gone_says_what_to_do() {
        let failure = failed(run(program(&["no-such-program"]), doc! {}).await);
        assert_eq!(failure.class, "spawn");
        assert!(
            failure.message.starts_with("cannot start `/bin/no-such-program`: No such file") && failure.message.contains("install it"),
            "{failure:?}"
        );
        let failure = failed(run(with(&["x"], |settings| settings.path = "/etc/passwd".into()), doc! {}).await);
        assert!(failure.class == "spawn" && failure.message.contains("allow the worker's user to execute it"), "{failure:?}");
        let failure = failed(run(with(&["true"], |settings| settings.directory = "/nowhere".into()), doc! {}).await);
        assert!(failure.class == "spawn" && failure.message.contains("create its directory `/nowhere`"), "{failure:?}");
        let failure = failed(run(program(&["true", "{x}"]), doc! { "x": "x".repeat(4_000_000) }).await);
        assert!(failure.class == failure::PARAMETERS && failure.message.contains("longer than the system allows"), "{failure:?}");
    }

    #[test]
    fn a_shortage_of_the_machine_is_not_the_jobs_fault() {
        let settings = program(&["true"]).settings;
        for errno in [Errno::EMFILE, Errno::ENFILE, Errno::EAGAIN, Errno::ENOMEM] {
            let not_done = settings.not_started(&errno.into());
            assert!(matches!(&not_done, NotDone::NoResources(failure) if failure.message.contains("short of files")), "{not_done:?}");
        }
        assert!(matches!(settings.not_started(&Errno::EACCES.into()), NotDone::Failed(_)));
    }

    /// Starts itself again with credentials in its environment: a test must not change its own.
    #[tokio::test]
    async fn the_environment_is_the_workers_without_its_credentials() {
        if std::env::var_os("RECRUITER_SECRET").is_none() {
            let test = std::env::current_exe().unwrap();
            let name = "programs::program::tests::the_environment_is_the_workers_without_its_credentials";
            let secrets = ["MONGODB_URI", "RECRUITER_SECRET", "RECRUITER_TIME_LIMIT_MS", "NOTIFY_SOCKET", "WATCHDOG_USEC"]
                .map(|name| (name, "secret"));
            let again = Command::new(test).args(["--exact", name]).envs(secrets).env("PLAIN", "kept").output().await.unwrap();
            let said = String::from_utf8_lossy(&again.stdout).into_owned();
            return assert!(again.status.success() && said.contains("1 passed"), "{said}");
        }
        let job = context();
        let environment = with(&["env"], |settings| {
            settings.path = "/usr/bin/env".into();
            settings.environment = BTreeMap::from([("ADDED".into(), "too".into()), ("RECRUITER_JOB_CLASS".into(), "untrue".into())]);
        });
        let variables = text(environment.decode(Bson::Null).unwrap().execute(&job).await);
        let has = |line: &str| variables.lines().any(|variable| variable == line);
        assert!(!variables.contains("secret"), "{variables}");
        assert!(has("PLAIN=kept") && has("ADDED=too") && has(&format!("RECRUITER_JOB_ID={}", job.job_id())), "{variables}");
        assert!(has("RECRUITER_JOB_CLASS=test") && has("RECRUITER_JOB_GROUP=generic"), "{variables}");
        assert!(has("RECRUITER_ATTEMPT=1") && has("RECRUITER_IS_LAST_ATTEMPT=false"), "{variables}");
        assert!(!variables.contains("RECRUITER_TIME_LIMIT_MS"), "{variables}");
        job.deadline.begin(Duration::from_secs(60));
        let variables = text(environment.decode(Bson::Null).unwrap().execute(&job).await);
        let left = variables.lines().find_map(|line| line.strip_prefix("RECRUITER_TIME_LIMIT_MS=")).unwrap();
        assert!((1..=60_000).contains(&left.parse().unwrap()), "{left}");
    }

    #[tokio::test]
    async fn it_runs_in_its_directory() {
        assert_eq!(text(run(with(&["pwd"], |settings| settings.directory = "/usr/share".into()), doc! {}).await), "/usr/share");
    }

    /// Starts a program with two children, one in a session of its own, waits for their ids, calls `stop` and expects all to be gone.
    async fn stopped(stop: impl AsyncFnOnce(tokio::task::JoinHandle<Result<Done, NotDone>>, Arc<Context>)) {
        let directory = tempfile::tempdir().unwrap();
        let file = directory.path().join("ids");
        let script = format!("sleep 600 & a=$!; setsid sleep 600 & echo $$ $a $! > '{0}.new'; mv '{0}.new' '{0}'; wait", file.display());
        let invocation = program(&["sh", "-c", "{script}"]).decode(bson::bson!({ "script": script })).unwrap();
        let job = context();
        let task = tokio::spawn({
            let job = job.clone();
            async move { invocation.execute(&job).await }
        });
        wait_until("it runs", || file.exists()).await;
        let ids = fs::read_to_string(&file).unwrap();
        assert!(ids.split(' ').all(is_running), "{ids}");
        stop(task, job).await;
        wait_until("all of it is killed", || !ids.split(' ').any(is_running)).await;
        let leader = ids.split(' ').next().unwrap();
        wait_until("it is reaped", || !Path::new(&format!("/proc/{leader}")).exists()).await;
    }

    #[tokio::test]
    async fn dropping_the_execution_kills_all_descendants() {
        stopped(async |task, _| {
            task.abort();
            assert!(task.await.unwrap_err().is_cancelled());
        })
        .await;
    }

    #[tokio::test]
    async fn cancellation_ends_all_descendants() {
        for (why, class) in [(Cancellation::Requested, failure::CANCELLED), (Cancellation::WorkerStopping, failure::INTERRUPTED)] {
            stopped(async |task, job| {
                job.cancel.cancel(why);
                let Err(NotDone::Stopped(failure)) = task.await.unwrap() else { panic!("not stopped") };
                assert_eq!(failure.class, class);
            })
            .await;
        }
    }

    /// Starts a script that writes its process id to `$0/started`, stops it, and returns how it ended and how long that took.
    async fn ended_by(kill_after: Duration, script: &str, directory: &Path, stop: impl FnOnce(&Context)) -> (Failure, Duration) {
        let arguments = ["sh", "-c", "{script}", directory.to_str().unwrap()];
        let program = with(&arguments, |settings| settings.kill_after = kill_after);
        // Its child is there before it says so: a signal reaches both.
        let script = format!("{script}; sleep 600 & echo $$ > \"$0/new\"; mv \"$0/new\" \"$0/started\"; wait; wait");
        let (invocation, job) = (program.decode(bson::bson!({ "script": script })).unwrap(), context());
        let task = tokio::spawn({
            let job = job.clone();
            async move { invocation.execute(&job).await }
        });
        wait_until("it runs", || directory.join("started").exists()).await;
        let asked = Instant::now();
        stop(&job);
        let Err(NotDone::Stopped(failure)) = task.await.unwrap() else { panic!("not stopped") };
        let leader = fs::read_to_string(directory.join("started")).unwrap();
        wait_until("it is gone", || !is_running(&leader)).await;
        (failure, asked.elapsed())
    }

    const HEARS: &str = "trap 'echo heard > \"$0/heard\"; exit 0' TERM";
    const DEAF: &str = "trap '' TERM";
    const HOUR: Duration = Duration::from_secs(3600);

    #[tokio::test]
    async fn a_program_is_asked_to_end_before_it_is_killed() {
        for why in [Cancellation::Requested, Cancellation::TimeLimit, Cancellation::WorkerStopping, Cancellation::MemoryLimit] {
            let directory = tempfile::tempdir().unwrap();
            ended_by(HOUR, HEARS, directory.path(), |job| job.cancel.cancel(why)).await;
            assert!(directory.path().join("heard").exists(), "{why:?}");
        }
    }

    #[tokio::test]
    async fn a_program_that_does_not_hear_is_killed_after_a_while() {
        let (directory, kill_after) = (tempfile::tempdir().unwrap(), Duration::from_millis(300));
        let (_, took) = ended_by(kill_after, DEAF, directory.path(), |job| job.cancel.cancel(Cancellation::Requested)).await;
        assert!((kill_after..HOUR).contains(&took), "{took:?}");
    }

    #[tokio::test]
    async fn a_second_signal_and_a_lost_lease_leave_a_program_no_time() {
        let directory = tempfile::tempdir().unwrap();
        let (failure, _) = ended_by(HOUR, DEAF, directory.path(), |job| {
            job.cancel.cancel(Cancellation::WorkerStopping);
            job.cancel.hurry();
        })
        .await;
        assert_eq!(failure.class, failure::INTERRUPTED);
        let directory = tempfile::tempdir().unwrap();
        ended_by(HOUR, HEARS, directory.path(), |job| job.cancel.cancel(Cancellation::ClaimLost)).await;
        assert!(!directory.path().join("heard").exists(), "the job may run elsewhere: no TERM that it could take its time for");
    }

    #[tokio::test]
    async fn descendants_that_keep_the_pipes_open_are_not_waited_for() {
        let started = Instant::now();
        let child = text(sh("sleep 600 & echo $!").await);
        assert!(started.elapsed() >= LINGER, "{:?}", started.elapsed());
        wait_until("the child is killed", || !is_running(&child)).await;
        // Out of the group's reach, so that only its pipes are let go.
        let begins = "d=$(mktemp -d); setsid sh -c 'echo $$; : > \"$0/up\"; exec sleep 600' \"$d\" & until test -e \"$d/up\"; do sleep 0.01; done; rm -r \"$d\"";
        let daemon = text(sh(begins).await);
        assert!(is_running(&daemon));
        nix::sys::signal::kill(Pid::from_raw(daemon.parse().unwrap()), Signal::SIGKILL).unwrap();
    }

    #[tokio::test]
    async fn descendants_that_let_go_of_the_pipes_of_a_program_that_succeeded_live_on() {
        let children = text(sh(&format!("{TWO_CHILDREN}; echo $a $b")).await);
        for child in children.split(' ') {
            assert!(is_running(child));
            nix::sys::signal::kill(Pid::from_raw(child.parse().unwrap()), Signal::SIGKILL).unwrap();
        }
    }

    const TWO_CHILDREN: &str =
        "sleep 600 < /dev/null > /dev/null 2>&1 & a=$!; setsid sleep 600 < /dev/null > /dev/null 2>&1 & b=$!; sleep 0.1";

    /// Neither beside the next attempt, nor after the last one.
    #[tokio::test]
    async fn nothing_goes_on_of_a_program_that_failed() {
        for end in ["exit 3", "exit 75", "kill -KILL $$"] {
            let directory = tempfile::tempdir().unwrap();
            let file = directory.path().join("ids");
            let ended = sh(&format!("{TWO_CHILDREN}; echo $a $b > '{}'; {end}", file.display())).await;
            assert!(ended.is_err(), "{ended:?}");
            let ids = fs::read_to_string(&file).unwrap();
            wait_until("both are killed", || !ids.split(' ').any(is_running)).await;
        }
    }

    /// A child may leave the group at the moment at which the program ends.
    #[tokio::test]
    async fn a_child_that_leaves_while_its_program_fails_is_found() {
        let directory = tempfile::tempdir().unwrap();
        let file = directory.path().join("ids");
        for _ in 0..50 {
            let script = format!("setsid sleep 600 < /dev/null > /dev/null 2>&1 & echo $! >> '{}'; exit 3", file.display());
            failed(sh(&script).await);
        }
        let ids = fs::read_to_string(&file).unwrap();
        wait_until("all are killed", || !ids.lines().any(is_running)).await;
    }
}

//! A fleet at work while MongoDB breaks: enqueuers that go on, jobs that last, and a look at what all of them use.

use std::{
    collections::HashMap,
    pin::pin,
    sync::{
        Arc,
        atomic::{AtomicBool, AtomicU32, Ordering},
    },
    time::Duration,
};

use recruiter_common::{ConnectArgs, EnqueueError, JobId, RetryManyTimes, Workable, shutdown::pause, store::Store};
use recruiter_tests::{
    ledger::{Entry, Event, Line, monotonic_ms},
    mongo::TestDatabase,
    oracle::{Asked, Findings, Policy},
    proxy::{Action, Armed, Proxy},
    report::Row,
    wait::SOON,
    world::{Role, World},
};
use tokio::{select, task::JoinHandle, time::timeout};

use crate::usage::Usage;

/// Makes the clients of the test itself, which only look, notice sooner than the processes that a member is silent.
const LOOKS: &str = "&connectTimeoutMS=3000&heartbeatFrequencyMS=1000";
/// Makes the processes close connections that were not used for so long, by default for a minute, so that the test can wait for it.
const CLOSES: &str = "&maxIdleTimeMS=5000";
/// Between two looks at the fleet.
const LOOK_EVERY: Duration = Duration::from_millis(100);
/// Between two jobs of an enqueuer, and before it sends one again.
const ENQUEUE_EVERY: Duration = Duration::from_millis(50);
const AGAIN_AFTER: Duration = Duration::from_millis(200);
/// More often than any job fails or is rescued here.
const AGAIN: u32 = 12;

/// Deaths take longer than the longest silence that MongoDB imposes on the living.
pub(crate) const PATIENT: Flags = Flags {
    recruiter: &["--lease", "5s", "--poll", "1s"],
    cleaner: &["--dead-after", "30s", "--every", "500ms"],
    worker: &["--heartbeat", "1s", "--lease", "10s", "--poll", "1s", "--grace", "5s"],
};

/// The arguments and environment of the processes.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Flags {
    pub(crate) recruiter: &'static [&'static str],
    pub(crate) cleaner: &'static [&'static str],
    pub(crate) worker: &'static [&'static str],
}

/// A world with enqueuers.
pub(crate) struct Stage {
    pub(crate) world: World,
    usage: Usage,
    enqueuers: Vec<Enqueuer>,
}

/// What came of a time on the stage.
pub(crate) struct Played {
    fault: String,
    pub(crate) findings: Findings,
    /// From each blow until everything went on.
    pub(crate) recovery: Vec<Duration>,
    /// Jobs that were sent more than once.
    sent_again: usize,
}

impl Stage {
    /// An empty stage on this MongoDB.
    pub(crate) async fn on(uri: &str) -> Self {
        Self { world: World::on(TestDatabase::on(&format!("{uri}{LOOKS}")).await).await, usage: Usage::default(), enqueuers: Vec::new() }
    }

    /// Starts processes that come to MongoDB by this URI, and returns their places.
    pub(crate) fn start(&mut self, uri: &str, flags: Flags, roles: &[Role]) -> Vec<usize> {
        let flags_of = |role| match role {
            Role::Recruiter => flags.recruiter,
            Role::Cleaner => flags.cleaner,
            Role::Worker => flags.worker,
        };
        let uri = format!("{uri}{CLOSES}");
        roles.iter().map(|role| self.world.start_at(&uri, *role, flags_of(*role), &[])).collect()
    }

    /// Starts an enqueuer that comes to MongoDB by this URI.
    pub(crate) async fn enqueue_by(&mut self, uri: &str) {
        self.enqueuers.push(Enqueuer::start(uri, &self.world.asked, None).await);
    }

    /// Starts one whose line is bad as well: many of its jobs are inserted, or are not, and it does not learn it. No other enqueuer may
    /// use this line.
    pub(crate) async fn enqueue_on_a_bad_line(&mut self, line: &Proxy) {
        let armed = [(Action::LoseReply, 1), (Action::Cut, 4)].map(|(action, turn)| {
            let asked = AtomicU32::new(0);
            // Twice in a row, or the driver itself would find out.
            line.arm(action, .., move |request| request.is("insert", "scheduled") && asked.fetch_add(1, Ordering::Relaxed) % 12 / 2 == turn)
        });
        let uri = line.uri(self.world.database.name());
        self.enqueuers.push(Enqueuer::start(&uri, &self.world.asked, Some(armed)).await);
    }

    /// Jobs that last longer than most faults, and some that fail again and again; returns when all of the former run.
    pub(crate) async fn enqueue_some_that_last(&mut self, ms: i64) {
        let again = RetryManyTimes::new(AGAIN, Duration::from_secs(1)).unwrap();
        for _ in 0..3 {
            self.world.enqueue(Entry { ms, failures: 0, deaf: true }.as_job(), Policy::Never).await.unwrap();
            let failing = Entry { ms: 300, failures: 4, deaf: false }.as_job();
            self.world.enqueue(failing.retry(&again), Policy::Again(AGAIN)).await.unwrap();
        }
        self.until("the jobs that last are begun", async |world| world.begun().len() >= 3).await;
    }

    /// Tends the fleet until something is true.
    pub(crate) async fn until(&mut self, what: &str, condition: impl AsyncFnMut(&World) -> bool) {
        let Self { world, usage, .. } = self;
        let mut condition = condition;
        let came = world.until(SOON, async |world| {
            usage.look(world);
            condition(world).await
        });
        let came = came.await;
        assert!(came, "not within {SOON:?}: {what}:\n{}", self.world.logs());
    }

    /// Tends the fleet while something happens.
    pub(crate) async fn during<T>(&mut self, happens: impl Future<Output = T>) -> T {
        let mut happens = pin!(happens);
        loop {
            self.world.tend();
            self.usage.look(&self.world);
            select! {
                done = &mut happens => return done,
                () = pause(LOOK_EVERY) => {}
            }
        }
    }

    /// The same for a fault; returns when it began. Some time later everything flows again, for a while at least.
    pub(crate) async fn blow(&mut self, happens: impl Future<Output = ()>) -> i64 {
        let begin = monotonic_ms();
        self.usage.begins();
        self.during(happens).await;
        let over = monotonic_ms();
        let goes_on = |world: &World| world.ledger().iter().any(|line| line.event == Event::Done && line.at_ms > over + 1_000);
        self.until("jobs are done again", async |world| goes_on(world)).await;
        self.usage.ends(&self.world);
        begin
    }

    /// Waits until everything is done, stops everything and judges.
    pub(crate) async fn close(mut self, fault: &str, blows: &[i64]) -> Played {
        let mut sent = Vec::new();
        let enqueuers = std::mem::take(&mut self.enqueuers);
        self.until("outcomes of enqueues are unknown", async |_| enqueuers.iter().all(Enqueuer::was_struck)).await;
        for mut enqueuer in enqueuers {
            enqueuer.over.store(true, Ordering::Relaxed);
            let ended = self.during(timeout(SOON, &mut enqueuer.task)).await;
            let ended = ended.unwrap_or_else(|_| panic!("nothing can be enqueued {SOON:?} after the last blow:\n{}", self.world.logs()));
            sent.extend(ended.unwrap());
        }
        let Self { world, usage, .. } = &mut self;
        let quiet = world.until(SOON, async |world| {
            usage.look(world);
            world.unfinished().await == 0
        });
        let quiet = quiet.await;
        let logs = if quiet { String::new() } else { world.logs() };
        world.until(SOON, async |world| usage.still_open(world).is_empty()).await;
        let open = usage.still_open(world);
        let ledger = self.world.ledger();
        let mut findings = self.world.judge().await;
        if !quiet {
            findings.broken.push(format!("I7: not quiet {SOON:?} after the last blow:\n{logs}"));
        }
        findings.broken.extend(open.into_iter().chain(self.usage.close()));
        let last = sent.iter().map(|sent| sent.asked_ms).max().unwrap_or(0);
        let ends = blows.iter().skip(1).copied().chain([last]);
        let recovery = blows.iter().zip(ends).map(|(blow, end)| recovery(&sent, &ledger, *blow, end)).collect();
        Played { fault: fault.to_owned(), findings, recovery, sent_again: sent.iter().filter(|sent| sent.times > 1).count() }
    }
}

/// The longest that nothing was begun between a blow and an end, or that one job was waited for that was enqueued in this time.
fn recovery(sent: &[Sent], ledger: &[Line], blow: i64, end: i64) -> Duration {
    let begins = ledger.iter().filter(|line| line.event == Event::Begin);
    let mut first: HashMap<JobId, i64> = HashMap::new();
    for line in begins.clone() {
        first.entry(line.execution().0).or_insert(line.at_ms);
    }
    let waited = |sent: &Sent| first.get(&sent.job).filter(|_| sent.asked_ms < end).map(|begun| begun - sent.asked_ms.max(blow));
    // Jobs are enqueued all the time, unless MongoDB is away.
    let times: Vec<i64> = [blow].into_iter().chain(begins.map(|line| line.at_ms).filter(|at| (blow..end).contains(at))).collect();
    let still = times.windows(2).map(|pair| pair[1] - pair[0]);
    let longest = sent.iter().filter_map(waited).chain(still).max().unwrap_or(0);
    Duration::from_millis(u64::try_from(longest).unwrap_or(0))
}

impl Played {
    /// No process died: a declared death is an error.
    pub(crate) fn without_deaths(mut self) -> Self {
        let deaths = self.findings.deaths;
        if deaths > 0 {
            self.findings.broken.push(format!("I10: {deaths} executions ended with a death, but no process died"));
        }
        self
    }

    /// Writes the row of the report; nothing was wrong.
    #[expect(clippy::print_stdout, reason = "the test runner shows it with a failed test")]
    pub(crate) fn end(mut self) {
        println!("{}: {:?}, {} sent again, {:?}", self.fault, self.recovery, self.sent_again, self.findings.all());
        let mut row = Row::new(self.fault);
        for recovery in &self.recovery {
            row.add(std::mem::take(&mut self.findings), *recovery);
        }
        row.close();
        assert!(self.sent_again > 0, "no outcome was ever unknown");
    }
}

/// A program that enqueues, waits for the acknowledgement, and sends again under the same id when there is none.
struct Enqueuer {
    over: Arc<AtomicBool>,
    task: JoinHandle<Vec<Sent>>,
    bad_line: Option<[Armed; 2]>,
}

/// A job that was acknowledged at last.
struct Sent {
    job: JobId,
    asked_ms: i64,
    times: u32,
}

impl Enqueuer {
    async fn start(uri: &str, asked: &Asked, bad_line: Option<[Armed; 2]>) -> Self {
        let store = Store::connect(&ConnectArgs::to(uri), "enqueuer").await.unwrap();
        let over = Arc::new(AtomicBool::new(false));
        let (asked, stop) = (asked.clone(), Arc::clone(&over));
        let task = tokio::spawn(async move {
            let mut all = Vec::new();
            while !stop.load(Ordering::Relaxed) {
                all.push(send(&store, &asked).await);
                pause(ENQUEUE_EVERY).await;
            }
            all
        });
        Self { over, task, bad_line }
    }

    /// Whether it has lost replies and whole requests, if its line is bad: each twice in a row.
    fn was_struck(&self) -> bool {
        self.bad_line.iter().flatten().all(|armed| armed.count() > 1)
    }
}

async fn send(store: &Store, asked: &Asked) -> Sent {
    let mut sent = Sent { job: JobId::new(), asked_ms: monotonic_ms(), times: 1 };
    asked.will_send(sent.job, Policy::Never);
    while let Err(error) = Entry::lasting(20).with_id(sent.job).enqueue(store).await {
        assert!(matches!(&error, EnqueueError::Store(error) if error.is_transient()), "{error}");
        sent.times += 1;
        asked.will_send(sent.job, Policy::SentAgain);
        pause(AGAIN_AFTER).await;
    }
    asked.was_acknowledged(sent.job);
    sent
}

//! `recruiter top`: a live view in the terminal. It shows throughput, latency, groups, workers and failures, and pauses groups, quiets and
//! stops workers, and retries jobs.
//!
//! | file | contents |
//! |---|---|
//! | `reading` | what is read from MongoDB, again and again |
//! | `history` | what ended in each of the last seconds |
//! | `board` | the state of the view: what is selected, what a key does |
//! | `screen` | how it is drawn |

mod board;
mod history;
mod reading;
mod screen;

use std::{
    io::{self, IsTerminal as _},
    time::Duration,
};

use anyhow::anyhow;
use clap::Args;
use crossterm::event::{Event, EventStream, KeyEventKind};
use futures_util::StreamExt as _;
use ratatui::DefaultTerminal;
use recruiter_common::{
    control::{Change, Revision},
    limits::Paused,
    shutdown::pause,
    store::{ConnectArgs, Store},
    telemetry::chain,
    workers::Chosen,
};
use tokio::sync::mpsc;
use tokio_util::task::AbortOnDropHandle;

use self::{
    board::{Act, Board, Step},
    reading::{Reader, Reading},
};
use super::{exit::usage, limits::this_operator, output::printable, redaction::Reveal};
use crate::views::{outcome::message, workers};

pub(super) const EXAMPLES: &str = "\
Keys:
  Tab, arrows     choose a table and a row
  p               pause the group, or resume it
  u, s            quiet the worker, or resume it; stop it
  r               retry the failed job
  Space           hold the picture still
  q, Esc, Ctrl-C  leave

Each change asks before it is made. `recruiter stats --json`, `recruiter roster --json` and
`recruiter jobs list --json` have the same for programs.";

#[derive(Args, Clone, Copy, Debug)]
pub(super) struct TopArgs {
    /// How long to wait between two readings; slower readings make it longer
    #[arg(long, env = "RECRUITER_TOP_EVERY", value_name = "DURATION", default_value = "2s", value_parser = humantime::parse_duration)]
    every: Duration,
    #[command(flatten)]
    reveal: Reveal,
}

/// The terminal, which is as it was before when this is dropped.
struct Terminal(DefaultTerminal);

impl Terminal {
    fn new() -> anyhow::Result<Self> {
        Ok(Self(ratatui::try_init().map_err(|error| anyhow!(error).context("the terminal cannot be used"))?))
    }
}

impl Drop for Terminal {
    fn drop(&mut self) {
        ratatui::restore();
    }
}

pub(super) async fn run(args: TopArgs, connect: &ConnectArgs) -> anyhow::Result<()> {
    if !(io::stdin().is_terminal() && io::stdout().is_terminal()) {
        return Err(usage("this command needs a terminal; `recruiter stats --json` is for programs"));
    }
    let store = Store::connect_to_ask(connect, "recruiter top").await?;
    let redaction = args.reveal.followed(&store).await?;
    let mut terminal = Terminal::new()?;
    let (mut readings, _reader) = read(Reader::new(store.clone(), redaction), args.every);
    let (answer, mut answers) = mpsc::channel(1);
    let mut acting = None;
    let mut keys = EventStream::new();
    let mut board = Board::new(store.database().name());
    loop {
        terminal.0.draw(|frame| screen::draw(frame, &board))?;
        tokio::select! {
            key = keys.next() => match key {
                Some(Ok(Event::Key(key))) if key.kind == KeyEventKind::Press => match board.key(key) {
                    Step::Stay => {}
                    Step::Leave => return Ok(()),
                    Step::Act(act) => {
                        let (connect, answer) = (connect.clone(), answer.clone());
                        acting = Some(AbortOnDropHandle::new(tokio::spawn(async move {
                            let said = done(&act, &connect).await.unwrap_or_else(|error| chain(&*error).to_string());
                            // The view may be closed meanwhile.
                            let _ = answer.send(said).await;
                        })));
                    }
                },
                Some(Ok(_)) => {}
                Some(Err(error)) => return Err(anyhow!(error).context("the keyboard cannot be read")),
                None => return Err(anyhow!("the terminal was closed")),
            },
            Some(reading) = readings.recv() => board.take(reading),
            Some(said) = answers.recv() => {
                acting = None;
                board.say(said);
            }
        }
        board.is_acting = acting.is_some();
    }
}

/// Reads in a task of its own, so that keys work while MongoDB is slow.
fn read(mut reader: Reader, every: Duration) -> (mpsc::Receiver<Result<Reading, String>>, AbortOnDropHandle<()>) {
    let (to, readings) = mpsc::channel(1);
    let task = async move {
        loop {
            let began = std::time::Instant::now();
            let reading = reader.next().await.map_err(|error| chain(&error).to_string());
            if to.send(reading).await.is_err() {
                return;
            }
            pause(every.max(began.elapsed() * reading::RARER)).await;
        }
    };
    (readings, AbortOnDropHandle::new(tokio::spawn(task)))
}

/// Makes a change, and says in a sentence what came of it.
async fn done(act: &Act, connect: &ConnectArgs) -> anyhow::Result<String> {
    let store = Store::connect(connect, "recruiter top").await?;
    let by = this_operator();
    Ok(match act {
        Act::Pause(group) => {
            store.pauses().pause(&Paused::Group(group.clone()), &by, None).await?;
            format!("paused {}: its jobs wait, and running jobs continue", printable(group, 80))
        }
        Act::Resume(group) => {
            store.pauses().resume(&Paused::Group(group.clone())).await?;
            format!("resumed {}", printable(group, 80))
        }
        Act::Worker(change, worker) => {
            let answers = store.workers().change(*change, &Chosen::Ids(vec![*worker]), &by, false).await?;
            answers.first().map_or_else(String::new, |answer| format!("{worker} {}", workers::message(*change, answer, false)))
        }
        Act::Retry(job) => {
            let retry = Change::Retry { again: false, with: Box::new(Revision::default()) };
            let changed = store.control(false).change(&retry, &[*job]).await?;
            changed.first().map_or_else(String::new, |(job, changed)| format!("{job}: {}", message(changed, false)))
        }
    })
}

//! `recruiter events`: writes what happens to jobs and workers.

use std::io::Write;

use clap::{Args, builder::BoolishValueParser};
use recruiter_common::{
    events::{Event, Received},
    shutdown::Shutdown,
    store::{ConnectArgs, Redaction, Store},
    topics::Pattern,
};
use serde_json::json;

use super::{
    output::{Format, moment, printable, reader_gone},
    redaction::Reveal,
    view::{document_line, json_line},
};
use crate::views::filter::{When, when_of_text};

pub(super) const EXAMPLES: &str = "\
Examples:
  recruiter events --follow
      all events from now on, until Ctrl-C
  recruiter events --follow --topic 'job.failed.*' --topic 'worker.*' --json
  recruiter events --since 10m
      what was published in the last ten minutes and is still held

A topic is words with dots between them. `*` stands for one word, at the end for one or more:
  job.enqueued.CLASS  job.started.CLASS   job.retried.CLASS
  job.done.CLASS      job.failed.CLASS    job.cancelled.CLASS  job.expired.CLASS
  worker.joined       worker.left         worker.died          leader.changed
  pause.added         pause.removed       group.changed
  limit.changed       limit.removed";

#[derive(Args, Clone, Debug)]
pub(super) struct EventsArgs {
    /// Pattern of topics, for example job.failed.*; may be given several times [default: *]
    #[arg(long = "topic", env = "RECRUITER_EVENTS_TOPIC", value_name = "PATTERN", value_delimiter = ',')]
    topics: Vec<Pattern>,
    /// Begin with the events since this instant, or since this long ago, that are still held
    #[arg(long, env = "RECRUITER_EVENTS_SINCE", value_name = "WHEN", value_parser = when_of_text)]
    since: Option<When>,
    /// Continue with new events until stopped
    #[arg(long, env = "RECRUITER_EVENTS_FOLLOW", value_parser = BoolishValueParser::new())]
    follow: bool,
    /// Size in bytes of the ring that holds the events, if it does not exist yet [default: 16777216]
    #[arg(long, env = "RECRUITER_EVENTS_RING_SIZE", value_name = "BYTES", value_parser = clap::value_parser!(i64).range(65_536..=1_099_511_627_776))]
    ring_size: Option<i64>,
    #[command(flatten)]
    format: Format,
    #[command(flatten)]
    reveal: Reveal,
}

pub(super) async fn run(args: EventsArgs, connect: &ConnectArgs, mut shutdown: Shutdown, out: &mut impl Write) -> anyhow::Result<()> {
    let patterns = if args.topics.is_empty() { vec![Pattern::everything()] } else { args.topics };
    if !args.follow {
        let store = Store::connect_to_ask(connect, "recruiter events").await?;
        let since = args.since.map(|when| when.by(store.now()));
        let redaction = args.reveal.of(&store).await?;
        let events = store.past_events(patterns, since).await?;
        return Ok(events.into_iter().try_for_each(|event| write_event(out, event, args.format, &redaction))?);
    }
    let store = Store::connect(connect, "recruiter events").await?;
    let since = args.since.map(|when| when.by(store.now()));
    store.prepare_events(args.ring_size).await?;
    let mut redaction = args.reveal.followed(&store).await?;
    let mut events = store.events(patterns, since).await?;
    let written = loop {
        tokio::select! {
            received = events.next() => {
                if let Err(error) = write_received(out, received, args.format, redaction.current().await).and_then(|()| out.flush()) {
                    break Err(error);
                }
            }
            () = reader_gone() => break Ok(()),
            () = shutdown.requested() => break Ok(()),
        }
    };
    events.close().await;
    Ok(written?)
}

fn write_received(out: &mut impl Write, received: Received, format: Format, redaction: &Redaction) -> std::io::Result<()> {
    match received {
        Received::Event(event) => write_event(out, event, format, redaction),
        Received::Missed(count) if format.json => json_line(out, &json!({ "missed": count })),
        Received::Missed(Some(count)) => writeln!(out, "{count} events were missed"),
        Received::Missed(None) | _ => writeln!(out, "an unknown number of events was missed"),
    }
}

fn write_event(out: &mut impl Write, mut event: Event, format: Format, redaction: &Redaction) -> std::io::Result<()> {
    redaction.event(&mut event.details);
    if format.json {
        return document_line(out, event.into_document());
    }
    let Event { topic, at, details, .. } = event;
    let details: Vec<String> = details
        .iter()
        .map(|(name, value)| {
            let text = value.as_object_id().map(|id| id.to_hex());
            let text = text.or_else(|| value.as_str().map(str::to_owned));
            let text = text.or_else(|| value.as_datetime().map(|at| moment(at.to_chrono())));
            let text = text.unwrap_or_else(|| value.to_string());
            format!("{name}={}", printable(&text, 120))
        })
        .collect();
    writeln!(out, "{}  {}  {}", moment(at), printable(&topic, 120), details.join(" "))
}

//! `recruiter publish` and `recruiter subscribe`: messages of applications.

use std::io::Write;

use bson::{Bson, Document, doc};
use clap::Args;
use recruiter_common::{
    messages::{From, Message, Position, PublishError},
    shutdown::Shutdown,
    spec::message_of_text,
    store::{ConnectArgs, Store},
    topics::Pattern,
};
use serde_json::json;

use super::{
    exit::usage,
    output::{Format, moment, printable, reader_gone},
    view::{document_line, json_line, or_dash},
};
use crate::views::filter::{When, when_of_text};

pub(super) const EXAMPLES: &str = "\
Examples:
  recruiter subscribe 'news.sports.*'
      messages from now on, until Ctrl-C
  recruiter subscribe 'orders.*' --since 10m --json
  recruiter subscribe 'orders.*' --after 8265A1B2…
      continue after a message: --json shows the position of each

A topic is words with dots between them. In a pattern `*` stands for one word, at the end for one or more.";

#[derive(Args, Clone, Debug)]
pub(super) struct PublishArgs {
    /// Topic: words with dots between them, for example news.sports.ski
    topic: String,
    /// Content: a JSON object; MongoDB's extended JSON for dates, ids and binary data
    #[arg(value_name = "JSON", value_parser = message_of_text)]
    body: Document,
    #[command(flatten)]
    format: Format,
}

#[derive(Args, Clone, Debug)]
pub(super) struct SubscribeArgs {
    /// Patterns of topics, for example news.*
    #[arg(required = true, value_name = "PATTERN")]
    patterns: Vec<Pattern>,
    /// Begin with the messages since this instant, or since this long ago
    #[arg(long, env = "RECRUITER_SUBSCRIBE_SINCE", value_name = "WHEN", value_parser = when_of_text, conflicts_with = "page_after")]
    since: Option<When>,
    /// Continue after the message with this position
    #[arg(long = "after", value_name = "POSITION")]
    page_after: Option<Position>,
    #[command(flatten)]
    format: Format,
}

/// Publishes a message. Only programs are told that it has succeeded.
pub(super) async fn publish(args: PublishArgs, connect: &ConnectArgs, out: &mut impl Write) -> anyhow::Result<()> {
    let store = Store::connect(connect, "recruiter publish").await?;
    match store.publish_message(&args.topic, &args.body).await {
        Err(PublishError::Store(error)) => Err(error.into()),
        Err(refused) => Err(usage(refused)),
        Ok(()) if args.format.json => Ok(json_line(out, &json!({ "topic": args.topic, "outcome": "published" }))?),
        Ok(()) => Ok(()),
    }
}

/// Writes messages until stopped.
pub(super) async fn subscribe(
    args: SubscribeArgs,
    connect: &ConnectArgs,
    mut shutdown: Shutdown,
    out: &mut impl Write,
) -> anyhow::Result<()> {
    let store = Store::connect(connect, "recruiter subscribe").await?;
    let from = match (args.page_after, args.since) {
        (Some(position), _) => From::After(position),
        (None, Some(when)) => From::Since(when.by(store.now())),
        (None, None) => From::Now,
    };
    let mut messages = store.subscribe_to(args.patterns, from).await?;
    loop {
        tokio::select! {
            received = messages.next() => {
                write_message(out, received?, args.format)?;
                out.flush()?;
            }
            () = reader_gone() => return Ok(()),
            () = shutdown.requested() => return Ok(()),
        }
    }
}

fn write_message(out: &mut impl Write, message: Message, format: Format) -> std::io::Result<()> {
    let Message { topic, body, at, position, .. } = message;
    if format.json {
        let at = at.map(bson::DateTime::from_chrono);
        return document_line(out, doc! { "topic": topic, "body": body, "at": at, "position": position.to_string() });
    }
    let at = or_dash(at.map(moment));
    let body = Bson::Document(body).into_relaxed_extjson().to_string();
    writeln!(out, "{at}  {}  {}", printable(&topic, 120), printable(&body, 4_000))
}

//! `recruiter jobs why`: why a job does not run, and what to do about it. The library has the reasons.

use std::io::Write;

use anyhow::anyhow;
use bson::{Document, doc};
use recruiter_common::{
    Why,
    ids::JobId,
    store::{ConnectArgs, Store},
};

use super::{
    limits::{holder_to_document, write_holders},
    output::{Format, moment},
    view::document_line,
};

/// Writes why a job does not run.
///
/// # Errors
/// When there is no such job, or MongoDB cannot be used.
pub(super) async fn run(id: JobId, format: Format, connect: &ConnectArgs, out: &mut impl Write) -> anyhow::Result<()> {
    let store = Store::connect_to_ask(connect, "recruiter jobs").await?;
    let why = store.why(id).await?.ok_or_else(|| anyhow!("no job has the id {id}, neither in `scheduled` nor in `archived`"))?;
    if format.json {
        let holders: Vec<Document> = why.holders.iter().map(holder_to_document).collect();
        let mut document = doc! { "id": id.to_string() };
        document.extend(said(&why));
        document.insert("holders", holders);
        return Ok(document_line(out, document)?);
    }
    writeln!(out, "{}: {}", why.reason, why.text)?;
    write_holders(&why.holders, out)
}

/// A reason, for programs.
pub(super) fn said(why: &Why) -> Document {
    doc! { "reason": why.reason.name(), "text": &why.text, "until": why.until.map(moment) }
}

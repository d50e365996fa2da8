//! `recruiter jobs why`: why a job does not run, and what to do about it. `recruiter groups why`: the same for the waiting jobs of a group,
//! with the number of jobs for each reason. The library has the reasons.

use std::io::Write;

use anyhow::anyhow;
use bson::{Document, doc};
use recruiter_common::{
    ids::JobId,
    store::{COUNTED, ConnectArgs, Store},
    why::{LANES, WhyGroup},
};

use super::{
    limits::write_holders,
    output::{Format, printable},
    view::document_line,
};
use crate::views::{job::why_to_document, limits::holder_to_document};

pub(super) async fn run(id: JobId, format: Format, connect: &ConnectArgs, out: &mut impl Write) -> anyhow::Result<()> {
    let store = Store::connect_to_ask(connect, "recruiter jobs").await?;
    let why = store.why(id).await?.ok_or_else(|| anyhow!("no job has the id {id}, neither in `scheduled` nor in `archived`"))?;
    if format.json {
        let holders: Vec<Document> = why.holders.iter().map(holder_to_document).collect();
        let mut document = doc! { "id": id.to_string() };
        document.extend(why_to_document(&why));
        document.insert("holders", holders);
        return Ok(document_line(out, document)?);
    }
    writeln!(out, "{}: {}", why.reason, why.text)?;
    write_holders(&why.holders, out)
}

/// Writes why the waiting jobs of a group do not run.
pub(super) async fn run_for_group(group: &str, format: Format, connect: &ConnectArgs, out: &mut impl Write) -> anyhow::Result<()> {
    let store = Store::connect_to_ask(connect, "recruiter groups").await?;
    let WhyGroup { reasons, is_complete, .. } = store.why_group(group).await?;
    if format.json {
        let with_count = |(why, jobs): &(_, u64)| {
            let mut document = why_to_document(why);
            document.insert("jobs", i64::try_from(*jobs).unwrap_or(i64::MAX));
            document
        };
        let reasons: Vec<Document> = reasons.iter().map(with_count).collect();
        return Ok(document_line(out, doc! { "name": group, "reasons": reasons, "is_complete": is_complete })?);
    }
    if reasons.is_empty() {
        return Ok(writeln!(out, "no job waits in {}", printable(group, 60))?);
    }
    for (why, jobs) in reasons {
        let or_more = if jobs >= COUNTED { " or more" } else { "" };
        writeln!(out, "{jobs}{or_more} {}: {}", why.reason, why.text)?;
    }
    if !is_complete {
        writeln!(out, "(the first {LANES} kinds of jobs were examined)")?;
    }
    Ok(())
}

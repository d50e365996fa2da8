//! `recruiter groups why`: why the waiting jobs of a group do not run, with the number of jobs for each reason. The library has the
//! reasons.

use std::io::Write;

use bson::{Document, doc};
use recruiter_common::{
    store::{COUNTED, ConnectArgs, Store},
    why::{LANES, WhyGroup},
};

use super::{
    output::{Format, printable},
    view::document_line,
    why::said,
};

/// Writes why the waiting jobs of a group do not run.
///
/// # Errors
/// When MongoDB cannot be used.
pub(super) async fn run(group: &str, format: Format, connect: &ConnectArgs, out: &mut impl Write) -> anyhow::Result<()> {
    let store = Store::connect_to_ask(connect, "recruiter groups").await?;
    let WhyGroup { reasons, is_complete, .. } = store.why_group(group).await?;
    if format.json {
        let with_count = |(why, jobs): &(_, u64)| {
            let mut document = said(why);
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

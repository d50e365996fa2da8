//! `recruiter audit`: lists what was done through `recruiter web`.

use std::io::Write;

use bson::{Bson, Document, oid::ObjectId};
use clap::Args;
use recruiter_common::store::{ConnectArgs, Store};

use super::{
    output::{Format, moment, printable},
    view::{Row, Stored, left, or_dash, print},
};
use crate::views::audit::to_json;

/// Maximum number of characters of a target or an outcome that are shown.
const SHOWN: usize = 400;

#[derive(Args, Clone, Debug)]
pub(super) struct AuditArgs {
    /// Maximum number of entries
    #[arg(long, env = "RECRUITER_AUDIT_LIMIT", value_name = "N", default_value_t = 20, value_parser = clap::value_parser!(u16).range(1..=1_000))]
    limit: u16,
    /// Continue after this entry, the last one of the previous page
    #[arg(long = "after", value_name = "ID", value_parser = id_of_text)]
    page_after: Option<ObjectId>,
    #[command(flatten)]
    format: Format,
}

fn id_of_text(text: &str) -> Result<ObjectId, String> {
    ObjectId::parse_str(text).map_err(|_| format!("`{text:.80}` is not the id of an entry (24 hexadecimal digits)"))
}

pub(super) async fn run(args: AuditArgs, connect: &ConnectArgs, out: &mut impl Write) -> anyhow::Result<()> {
    let store = Store::connect_to_ask(connect, "recruiter audit").await?;
    let found = store.audited(args.limit, args.page_after).await?;
    Ok(print(out, args.format, "nothing was changed through `recruiter web`", found.into_iter().map(view))?)
}

fn view(entry: Document) -> Stored {
    let text = |field| entry.get_str(field).map(|text| printable(text, 80)).ok();
    let document = |field| entry.get_document(field).map(|document| Bson::from(document.clone()).into_relaxed_extjson().to_string());
    let cells = [
        left("ID", or_dash(entry.get_object_id("_id").ok())),
        left("AT", or_dash(entry.get_datetime("at").ok().map(|at| moment(at.to_chrono())))),
        left("CALLER", or_dash(text("caller"))).cut_to(8),
        left("ADDRESS", or_dash(text("address"))).cut_to(10),
        left("ACTION", or_dash(text("action"))),
    ];
    let target = document("target").unwrap_or_else(|_| "-".into());
    let outcome = document("outcome").unwrap_or_else(|_| "not known".into());
    let below = format!("{}: {}", printable(&target, SHOWN), printable(&outcome, SHOWN));
    Stored { row: Row::from(cells).below(Some(below)), document: to_json(entry) }
}

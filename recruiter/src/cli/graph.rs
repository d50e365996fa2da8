//! `recruiter graph`: enqueues, shows, cancels and retries graphs of jobs.

use std::{
    collections::BTreeMap,
    io::{Read as _, Write},
    path::PathBuf,
    time::Duration,
};

use anyhow::{Context as _, anyhow};
use clap::{Args, Subcommand, ValueEnum, builder::BoolishValueParser};
use recruiter_common::{
    JobId,
    control::Changed,
    enqueue::EnqueueError,
    exit::Exit,
    graphs::{Graph, GraphJob, When},
    ids::GraphId,
    job::Stage,
    spec::{Classes, InvalidSpec, duration_of_text},
    store::{ConnectArgs, Redaction, Store},
    telemetry::chain,
    wait::WaitError,
};
use serde_json::json;

use super::{
    connected,
    exit::{unreadable, usage},
    output::{Format, printable},
    presence::{Needs, warn_of_unmet},
    redaction::Reveal,
    retries::unknown_policies,
    view::{Row, View, left, line, or_dash, print},
};
use crate::views::{
    graph::{Failure, Listed, Parent, nothing_changed, unknown},
    outcome::message,
};

pub(super) const ENQUEUE_EXAMPLES: &str = "\
The file is one JSON object. Each job has a name, by which the others wait for it:

  {\"jobs\": {
    \"fetch\":    {\"class\": \"fetch\", \"parameters\": {\"url\": \"a\"}},
    \"index\":    {\"class\": \"index\", \"waits_for\": [\"fetch\"]},
    \"alarm\":    {\"class\": \"mail\",
                 \"waits_for\": [{\"job\": \"index\", \"when\": \"failed\"}]},
    \"clean up\": {\"class\": \"clean-up\",
                 \"waits_for\": [{\"job\": \"index\", \"when\": \"ended\"}]}
  }}

All jobs are enqueued, or none. A job that waits for a job that fails is cancelled, unless it waits for
its failure or for any end.

Examples:
  recruiter graph enqueue nightly.json
  generate-graph | recruiter graph enqueue - --json";

pub(super) const SHOW_EXAMPLES: &str = "\
Examples:
  recruiter graph show 65a1b2c3d4e5f60718293a4b
  recruiter graph show 65a1b2c3d4e5f60718293a4b --draw dot |
      dot -Tsvg > graph.svg";

#[derive(Subcommand, Clone, Debug)]
pub(super) enum GraphCommand {
    /// Enqueue the jobs of a file, all or none, and write the id of the graph
    #[command(after_help = ENQUEUE_EXAMPLES)]
    Enqueue {
        /// A JSON file; `-` is standard input
        file: PathBuf,
        /// Accept retry policies that only your workers know, not this program
        #[arg(long, env = "RECRUITER_ENQUEUE_CUSTOM_POLICY", value_parser = BoolishValueParser::new())]
        custom_policy: bool,
        #[command(flatten)]
        format: Format,
    },
    /// Show the jobs of a graph with their states
    #[command(after_help = SHOW_EXAMPLES)]
    Show {
        /// Id of the graph
        #[arg(value_parser = graph_of_text)]
        id: GraphId,
        /// Write the graph in a language for drawings
        #[arg(long, env = "RECRUITER_GRAPH_DRAW", value_name = "LANGUAGE", conflicts_with = "json")]
        draw: Option<Language>,
        #[command(flatten)]
        format: Format,
        #[command(flatten)]
        reveal: Reveal,
    },
    /// Wait until all jobs of a graph are finished, and show them
    Wait {
        /// Id of the graph
        #[arg(value_parser = graph_of_text)]
        id: GraphId,
        /// Maximum time to wait, after which the command ends with code 124 [default: no limit]
        #[arg(long, env = "RECRUITER_WAIT_TIMEOUT", value_name = "DURATION", value_parser = duration_of_text)]
        timeout: Option<Duration>,
        #[command(flatten)]
        format: Format,
        #[command(flatten)]
        reveal: Reveal,
    },
    /// Cancel all jobs of a graph that are not finished
    Cancel(ChangeArgs),
    /// Enqueue again the jobs of a graph that failed or were cancelled, with edges between the new jobs
    Retry(ChangeArgs),
}

#[derive(Args, Clone, Debug)]
pub(super) struct ChangeArgs {
    /// Id of the graph
    #[arg(value_parser = graph_of_text)]
    id: GraphId,
    /// Only report the jobs that would be changed
    #[arg(long, env = "RECRUITER_DRY_RUN", value_parser = BoolishValueParser::new())]
    dry_run: bool,
    #[command(flatten)]
    format: Format,
}

/// A language for drawings of graphs.
#[derive(Clone, Copy, Debug, ValueEnum)]
pub(super) enum Language {
    /// Graphviz
    Dot,
    /// Mermaid, which many wikis and code hosts draw
    Mermaid,
}

fn graph_of_text(text: &str) -> Result<GraphId, InvalidSpec> {
    text.parse().map_err(|_| InvalidSpec::of_text(format!("`{text:.80}` is not the id of a graph (24 hexadecimal digits)")))
}

pub(super) async fn run(command: GraphCommand, connect: &ConnectArgs, out: &mut impl Write) -> anyhow::Result<()> {
    match command {
        GraphCommand::Enqueue { file, custom_policy, format } => enqueue(file, custom_policy, format, connect, out).await,
        GraphCommand::Show { id, draw, format, reveal } => show(id, draw, (format, reveal), connect, out).await,
        GraphCommand::Wait { id, timeout, format, reveal } => wait(id, timeout, (format, reveal), connect, out).await,
        GraphCommand::Cancel(args) => change(args, true, connect, out).await,
        GraphCommand::Retry(args) => change(args, false, connect, out).await,
    }
}

async fn enqueue(file: PathBuf, custom_policy: bool, format: Format, connect: &ConnectArgs, out: &mut impl Write) -> anyhow::Result<()> {
    let mut bytes = Vec::new();
    if file.as_os_str() == "-" {
        std::io::stdin().read_to_end(&mut bytes).context("cannot read standard input")?;
    } else {
        bytes = std::fs::read(&file).map_err(|error| unreadable(&file, error))?;
    }
    let text = String::from_utf8(bytes).map_err(|error| usage(format!("{} is not UTF-8: {error}", file.display())))?;
    let unknown = unknown_policies(custom_policy);
    let graph_of =
        |classes: &Classes| Graph::of_json(&text, classes, unknown).map_err(|problem| usage(format!("{}: {problem}", file.display())));
    // A wrong file is an error even without MongoDB.
    if graph_of(&Classes::new())?.0.is_empty() {
        return Err(usage(format!("{} has no jobs", file.display())));
    }
    let store = Store::connect(connect, "recruiter graph").await?;
    let (graph, names) = graph_of(&store.class_defaults().await?)?;
    let (id, needs) = (graph.id(), Needs::of(graph.jobs()));
    graph.enqueue(&store).await.map_err(|error| {
        if let EnqueueError::Store(error) = error {
            return anyhow!(error);
        }
        // The file has names in place of the ids.
        let problem = names.iter().fold(chain(&error), |text, (name, id)| text.replace(&id.to_string(), &format!("{name:.80?}")));
        usage(format!("{}: {problem}", file.display()))
    })?;
    warn_of_unmet(&store, &needs).await;
    let jobs: BTreeMap<String, String> = names.into_iter().map(|(name, job)| (name, job.to_string())).collect();
    Ok(line(out, format, &json!({ "id": id.to_string(), "jobs": jobs }), id)?)
}

async fn jobs_of(store: &Store, id: GraphId) -> anyhow::Result<Vec<GraphJob>> {
    found(id, store.graph(id).await?)
}

fn found(id: GraphId, jobs: Vec<GraphJob>) -> anyhow::Result<Vec<GraphJob>> {
    match jobs {
        jobs if jobs.is_empty() => Err(anyhow!(unknown(id))),
        jobs => Ok(jobs),
    }
}

async fn show(
    id: GraphId,
    draw: Option<Language>,
    (format, reveal): (Format, Reveal),
    connect: &ConnectArgs,
    out: &mut impl Write,
) -> anyhow::Result<()> {
    let store = Store::connect_to_ask(connect, "recruiter graph").await?;
    let jobs = jobs_of(&store, id).await?;
    match draw {
        Some(Language::Dot) => Ok(dot(&jobs, out)?),
        Some(Language::Mermaid) => Ok(mermaid(&jobs, out)?),
        None => list(&jobs, format, &reveal.of(&store).await?, out),
    }
}

async fn wait(
    id: GraphId,
    timeout: Option<Duration>,
    (format, reveal): (Format, Reveal),
    connect: &ConnectArgs,
    out: &mut impl Write,
) -> anyhow::Result<()> {
    let store = Store::connect_to_ask(connect, "recruiter graph").await?;
    // The wait repeats each read that fails. A graph without jobs has ended.
    let jobs = match store.wait_for_graph(id, timeout.unwrap_or(Duration::MAX)).await {
        Err(late @ WaitError::TimedOut { .. }) => return Err(anyhow!(late).context(Exit::TimedOut)),
        waited => found(id, waited?)?,
    };
    list(&jobs, format, &reveal.of(&store).await?, out)?;
    let failed = jobs.iter().filter(|job| job.state == Stage::Failed && !job.is_retried).count();
    // An alarm that waits for a failure is cancelled when there is none.
    let cancelled = jobs.iter().filter(|job| job.state == Stage::Cancelled && job.is_to_repeat()).count();
    if failed + cancelled > 0 {
        return Err(anyhow!("{failed} jobs of the graph failed, and {cancelled} were cancelled").context(Exit::JobFailed));
    }
    Ok(())
}

fn list(jobs: &[GraphJob], format: Format, redaction: &Redaction, out: &mut impl Write) -> anyhow::Result<()> {
    if !format.json {
        let mut counts: BTreeMap<&str, usize> = BTreeMap::new();
        for job in jobs {
            *counts.entry(job.state.word()).or_default() += 1;
        }
        let counts: Vec<String> = counts.into_iter().map(|(state, count)| format!("{count} {state}")).collect();
        writeln!(out, "{} jobs: {}", jobs.len(), counts.join(", "))?;
    }
    Ok(print(out, format, "", jobs.iter().cloned().map(|job| Listed::of(job, redaction)))?)
}

/// Maximum number of parents that are named in a line.
const NAMED: usize = 3;

impl View for Listed {
    fn row(self) -> Row {
        let Self { id, class, group: _, state, waits_for, why, continued_as, recovered_from: _, retried_as, retrying, error } = self;
        let more = waits_for.len().saturating_sub(NAMED);
        let named = |Parent { job, when }| if when == When::Done.word() { job } else { format!("{job} {when}") };
        let parents = waits_for.into_iter().take(NAMED).map(named).collect::<Vec<_>>().join(", ");
        let parents = if more > 0 { format!("{parents} and {more} more") } else { parents };
        let remark = match continued_as.as_slice() {
            [one] => format!("became {one}"),
            several @ [_, ..] => format!("became {} jobs", several.len()),
            [] => {
                let retried = match retried_as {
                    Some(new) => Some(format!("retried as {new}")),
                    None => retrying.then(|| "not retried yet".to_owned()),
                };
                let why = why.filter(|_| state == Stage::Failed.word());
                let failure = error.map(|Failure { class, message }| format!("{class}: {message}"));
                [retried, why, failure].into_iter().flatten().collect::<Vec<_>>().join("; ")
            }
        };
        let parents = Some(parents).filter(|parents| !parents.is_empty());
        Row::from([
            left("JOB", id),
            left("STATE", state),
            left("CLASS", printable(&class, 60)),
            left("WAITS FOR", or_dash(parents)),
            left("REMARK", printable(&remark, 200)),
        ])
    }
}

fn color(job: &GraphJob) -> &'static str {
    match job.state {
        Stage::Done => "palegreen",
        Stage::Running | Stage::Cancelling => "lightblue",
        Stage::Queued | Stage::Postponed => "lightyellow",
        Stage::Waits => "white",
        Stage::Failed if !job.is_retried => "salmon",
        Stage::Cancelled | Stage::Failed => "lightgrey",
    }
}

/// Edges with their labels: from a job to those that wait for it, and to those that it became.
fn edges(jobs: &[GraphJob]) -> Vec<(JobId, JobId, &'static str)> {
    let mut edges = Vec::new();
    for job in jobs {
        let label = |when: When| if when == When::Done { "" } else { when.word() };
        edges.extend(job.waits_for.iter().map(|edge| (edge.job, job.id, label(edge.when))));
        edges.extend(job.continued_as.iter().map(|next| (job.id, *next, "became")));
        edges.extend(job.recovered_from.map(|old| (old, job.id, "retried")));
    }
    edges
}

/// Text inside of quotation marks, in both languages.
fn quoted(text: &str) -> String {
    printable(text, 60).replace(['"', '\\'], "'")
}

fn dot(jobs: &[GraphJob], out: &mut impl Write) -> std::io::Result<()> {
    writeln!(out, "digraph jobs {{\n  node [shape=box, style=filled];")?;
    for job in jobs {
        let (class, state) = (quoted(&job.class), job.state.word());
        writeln!(out, "  \"{}\" [label=\"{class}\\n{state}\", fillcolor={}];", job.id, color(job))?;
    }
    for (from, to, label) in edges(jobs) {
        writeln!(out, "  \"{from}\" -> \"{to}\" [label=\"{label}\"];")?;
    }
    writeln!(out, "}}")
}

fn mermaid(jobs: &[GraphJob], out: &mut impl Write) -> std::io::Result<()> {
    writeln!(out, "flowchart LR")?;
    for job in jobs {
        writeln!(out, "  j{}[\"{}<br/>{}\"]", job.id, quoted(&job.class), job.state.word())?;
    }
    for (from, to, label) in edges(jobs) {
        let arrow = if label.is_empty() { "-->".to_owned() } else { format!("-- {label} -->") };
        writeln!(out, "  j{from} {arrow} j{to}")?;
    }
    Ok(())
}

async fn change(args: ChangeArgs, is_cancel: bool, connect: &ConnectArgs, out: &mut impl Write) -> anyhow::Result<()> {
    let store = connected(connect, "recruiter graph", args.dry_run).await?;
    let is_retrying = jobs_of(&store, args.id).await?.iter().any(|job| job.is_retrying);
    let mut control = store.control(args.dry_run);
    let changed = if is_cancel { control.cancel_graph(args.id).await? } else { control.retry_graph(args.id).await? };
    let mut written = Vec::new();
    for (job, change) in &changed {
        let mut view = json!({ "id": job.to_string(), "outcome": change.word() });
        if let Changed::EnqueuedAgain { new: Some(new), .. } = change {
            written.push(*new);
            view["new_id"] = json!(new.to_string());
        }
        line(out, args.format, &view, format_args!("{job}: {}", message(change, args.dry_run)))?;
    }
    if changed.is_empty() && !args.format.json {
        writeln!(out, "{}", nothing_changed(is_cancel, is_retrying, args.dry_run))?;
    }
    out.flush()?;
    warn_of_unmet(&store, &Needs::of_stored(&store, &written).await).await;
    Ok(())
}

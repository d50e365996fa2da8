//! `recruiter files`: the files of jobs, in GridFS.

use std::{io::Write, os::fd::AsFd as _, path::PathBuf, str::FromStr};

use anyhow::{Context as _, anyhow};
use clap::{Subcommand, builder::BoolishValueParser};
use recruiter_common::{
    files::{FileError, JobFile},
    flags::value_of_text,
    ids::JobId,
    instant::Instant,
    spec::id_of_text,
    store::{ConnectArgs, Store},
};
use serde::Serialize;
use tokio::{
    fs::File,
    io::{AsyncReadExt as _, AsyncWriteExt as _},
};

use super::{
    connected,
    exit::{unreadable, usage},
    output::{Format, is_closed, moment, printable},
    view::{Row, View, date, left, line, outcome, print, right},
};

const EXAMPLES: &str = "\
Files are in GridFS, for payloads and results that are too large for a document. They stay as long
as their job is in the database.

Examples:
  recruiter enqueue --class read-text --file scan.tiff
  recruiter files list 65a1b2c3d4e5f60718293a4b
  recruiter files get 65a1b2c3d4e5f60718293a4b text.txt --output text.txt
  wc scan.tiff | recruiter files put 65a1b2c3d4e5f60718293a4b counts.txt";

/// Size of the parts in which a file is read.
const PART: usize = 255 * 1024;

#[derive(Subcommand, Clone, Debug)]
#[command(after_help = EXAMPLES)]
pub(super) enum FilesCommand {
    /// List the files of a job
    List {
        /// Id of the job
        #[arg(value_parser = id_of_text)]
        job: JobId,
        #[command(flatten)]
        format: Format,
    },
    /// Write a file of a job to standard output
    Get {
        /// Id of the job
        #[arg(value_parser = id_of_text)]
        job: JobId,
        /// Name of the file
        #[arg(value_parser = value_of_text)]
        name: String,
        /// Write it to this file [default: standard output]
        #[arg(long, env = "RECRUITER_FILES_OUTPUT", value_name = "FILE")]
        output: Option<PathBuf>,
    },
    /// Store a file for a job; it replaces an earlier one of this name
    Put {
        /// Id of the job
        #[arg(value_parser = id_of_text)]
        job: JobId,
        /// Name of the file
        #[arg(value_parser = value_of_text)]
        name: String,
        /// The content [default: standard input]
        content: Option<PathBuf>,
        #[command(flatten)]
        format: Format,
    },
    /// Delete a file of a job
    Delete {
        /// Id of the job
        #[arg(value_parser = id_of_text)]
        job: JobId,
        /// Name of the file
        #[arg(value_parser = value_of_text)]
        name: String,
        /// Only show what would be deleted
        #[arg(long, env = "RECRUITER_DRY_RUN", value_parser = BoolishValueParser::new())]
        dry_run: bool,
        #[command(flatten)]
        format: Format,
    },
}

/// A file that is enqueued with its job: `PATH`, or `NAME=PATH`.
#[derive(Clone, Debug)]
pub(super) struct NewFile {
    name: String,
    path: PathBuf,
}

impl FromStr for NewFile {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        if let Some((name, path)) = text.split_once('=') {
            return Ok(Self { name: name.into(), path: path.into() });
        }
        let path = PathBuf::from(text);
        let name = path.file_name().and_then(|name| name.to_str()).ok_or("it names no file: use NAME=PATH")?;
        Ok(Self { name: name.into(), path })
    }
}

/// Stores the files of a job that is about to be enqueued.
pub(super) async fn put_all(store: &Store, job: JobId, files: &[NewFile]) -> anyhow::Result<()> {
    for NewFile { name, path } in files {
        store.put_file(job, name, open(path).await?).await.map_err(refused)?;
    }
    Ok(())
}

/// Deletes the files of a job that was not enqueued. If that fails, the cleaner deletes them later.
pub(super) async fn delete_all(store: &Store, job: JobId, files: &[NewFile]) -> anyhow::Result<()> {
    for NewFile { name, .. } in files {
        store.delete_file(job, name).await?;
    }
    Ok(())
}

pub(super) async fn run(command: FilesCommand, connect: &ConnectArgs, out: &mut impl Write) -> anyhow::Result<()> {
    match command {
        FilesCommand::List { job, format } => list(&connected(connect, "recruiter files", true).await?, job, format, out).await,
        FilesCommand::Get { job, name, output } => get(&connected(connect, "recruiter files", true).await?, job, &name, output, out).await,
        FilesCommand::Put { job, name, content, format } => {
            let content = match &content {
                Some(path) => open(path).await?,
                None => File::from_std(std::io::stdin().as_fd().try_clone_to_owned().context("cannot read standard input")?.into()),
            };
            let store = Store::connect(connect, "recruiter files").await?;
            find(&store, job).await?;
            let stored = store.put_file(job, &name, content).await.map_err(refused)?;
            let mut view = outcome(&name, "stored", false);
            view["bytes"] = stored.bytes.into();
            Ok(line(out, format, &view, format_args!("{}: {} bytes", printable(&name, 256), stored.bytes))?)
        }
        FilesCommand::Delete { job, name, dry_run, format } => {
            let store = connected(connect, "recruiter files", dry_run).await?;
            let there =
                if dry_run { store.files(job).await?.iter().any(|file| file.name == name) } else { store.delete_file(job, &name).await? };
            if !there {
                return Err(FileError::NotFound { job, name }.into());
            }
            let done = if dry_run { "would delete" } else { "deleted" };
            Ok(line(out, format, &outcome(&name, "deleted", dry_run), format_args!("{done} the file {}", printable(&name, 256)))?)
        }
    }
}

/// A job that does not exist keeps no file.
async fn find(store: &Store, job: JobId) -> anyhow::Result<()> {
    let found = store.job(job).await?;
    found.map(drop).ok_or_else(|| anyhow!("there is no job {job}"))
}

fn refused(error: FileError) -> anyhow::Error {
    if matches!(error, FileError::Name { .. }) { usage(error) } else { error.into() }
}

async fn open(path: &PathBuf) -> anyhow::Result<File> {
    File::open(path).await.map_err(|error| unreadable(path, error))
}

async fn list(store: &Store, job: JobId, format: Format, out: &mut impl Write) -> anyhow::Result<()> {
    let files = store.files(job).await?;
    if files.is_empty() {
        find(store, job).await?;
    }
    if files.is_empty() && !format.json {
        return Ok(writeln!(std::io::stderr(), "the job has no files")?);
    }
    Ok(print(out, format, "", files.into_iter().map(|JobFile { name, bytes, written_at, .. }| Listed { name, bytes, written_at }))?)
}

/// A file of a job.
#[derive(Serialize)]
struct Listed {
    name: String,
    bytes: u64,
    #[serde(serialize_with = "date")]
    written_at: Instant,
}

impl View for Listed {
    fn row(self) -> Row {
        let Self { name, bytes, written_at } = self;
        [left("NAME", printable(&name, 256)).cut_to(8), right("BYTES", bytes), left("WRITTEN", moment(written_at))].into()
    }
}

async fn get(store: &Store, job: JobId, name: &str, output: Option<PathBuf>, out: &mut impl Write) -> anyhow::Result<()> {
    let mut content = store.open_file(job, name).await?;
    let mut file = match &output {
        Some(path) => Some(File::create(path).await.with_context(|| format!("cannot create the file {}", path.display()))?),
        None => None,
    };
    let mut part = vec![0; PART];
    loop {
        let read = content.read(&mut part).await.with_context(|| format!("the file {} is not whole", printable(name, 256)))?;
        match &mut file {
            _ if read == 0 => break,
            Some(file) => file.write_all(&part[..read]).await.context("cannot write the file")?,
            None => out.write_all(&part[..read])?,
        }
        // The reader has all that it wants, as in `| head`.
        if file.is_none() && is_closed() {
            break;
        }
    }
    if let Some(file) = &mut file {
        file.flush().await.context("cannot write the file")?;
    }
    Ok(out.flush()?)
}

//! Files of jobs: payloads and results that are too large for a document, from the enqueuer over the workable to the reader.

use std::{fs, io, pin::Pin, task};

use bson::{doc, oid::ObjectId};
use mongodb::{gridfs::GridFsBucket, options::GridFsBucketOptions};
use recruiter_common::{JobId, NewJob, files::FileError};
use recruiter_tests::{
    local::{Local, prepared},
    mongo::TestDatabase,
    processes::Process,
    wait::{SOON, wait_until},
    workable,
};
use recruiter_worker::{Context, Executable, NotDone, Worker};
use serde::{Deserialize, Serialize};
use tokio::io::{AsyncRead, AsyncReadExt as _, ReadBuf};

use super::cli::recruiter;

/// More than a document may have.
const LARGE: usize = 20_000_000;

/// Turns a file into one with the opposite bytes.
#[derive(Serialize, Deserialize)]
struct Invert {
    file: String,
}
workable!(Invert -> u64);

impl Executable for Invert {
    type State = ();

    async fn execute(&self, _: &(), job: &Context) -> Result<u64, NotDone> {
        let (store, mut content) = (job.client(), Vec::new());
        store.open_file(job.job_id(), &self.file).await?.read_to_end(&mut content).await?;
        content.iter_mut().for_each(|byte| *byte = !*byte);
        Ok(store.put_file(job.job_id(), "inverted", content.as_slice()).await?.bytes)
    }
}

fn content() -> Vec<u8> {
    (0..LARGE).map(|n| u8::try_from(n % 253).unwrap()).collect()
}

fn bucket(database: &TestDatabase) -> GridFsBucket {
    database.database().gridfs_bucket(GridFsBucketOptions::builder().bucket_name("payloads".to_owned()).build())
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_file_goes_from_the_enqueuer_to_the_workable_and_its_result_back() {
    let (database, directory) = (TestDatabase::new().await, tempfile::tempdir().unwrap());
    let path = |name: &str| directory.path().join(name).to_str().unwrap().to_owned();
    fs::write(path("scan.tiff"), content()).unwrap();
    let (_recruiter, worker) =
        (Local::recruiter(&database, &[]), Local::worker(&database, Worker::new().register::<Invert>(()).unwrap(), &[]));
    let parameters = ["--class", "Invert", "--parameters", r#"{"file": "scan.tiff"}"#];
    let said = recruiter(&database, &[&["enqueue", "--json", "--wait", "--file", &path("scan.tiff")], &parameters[..]].concat());
    assert_eq!((said.code, said.out.contains("20000000")), (0, true), "{} {}", said.out, said.err);
    let job = database.raw("archived").find_one(doc! {}).await.unwrap().unwrap().get_object_id("_id").unwrap().to_hex();
    let listed = recruiter(&database, &["files", "list", &job, "--json"]).objects();
    let listed: Vec<_> = listed.iter().map(|file| (file["name"].as_str().unwrap(), file["bytes"].as_u64().unwrap())).collect();
    assert_eq!(listed, [("inverted", 20_000_000), ("scan.tiff", 20_000_000)]);
    assert!(recruiter(&database, &["files", "list", &job]).out.contains("20000000"));
    assert_eq!(recruiter(&database, &["files", "get", &job, "inverted", "--output", &path("inverted")]).code, 0);
    assert!(fs::read(path("inverted")).unwrap().iter().zip(content()).all(|(inverted, byte)| *inverted == !byte));
    worker.stop().await;
}

/// Each is an error that says what to do, and leaves nothing behind.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn the_command_line_stores_lists_and_deletes_files_and_refuses_what_is_wrong() {
    let ((database, store), directory) = (prepared().await, tempfile::tempdir().unwrap());
    let file = directory.path().join("a b.txt").to_str().unwrap().to_owned();
    fs::write(&file, "text").unwrap();
    let job = NewJob::of_class("c", doc! {}).enqueue(&store).await.unwrap().id.to_string();
    let say = |args: &[&str]| {
        let said = recruiter(&database, &[&["files"], args].concat());
        (said.code, said.out.trim().to_owned() + said.err.trim())
    };
    assert_eq!(say(&["put", &job, "notes/ünï", &file]), (0, "notes/ünï: 4 bytes".into()));
    assert_eq!(say(&["put", &job, "empty"]), (0, "empty: 0 bytes".into()), "standard input is empty");
    assert_eq!(say(&["get", &job, "notes/ünï"]), (0, "text".into()));
    assert_eq!(say(&["delete", &job, "empty", "--dry-run"]), (0, "would delete the file empty".into()));
    assert_eq!(say(&["delete", &job, "empty"]), (0, "deleted the file empty".into()));
    let nobody = JobId::new().to_string();
    for (args, code, problem) in [
        (&["get", &job, "empty"][..], 1, "has no file \"empty\""),
        (&["delete", &job, "empty"], 1, "has no file \"empty\""),
        (&["list", &nobody], 1, "there is no job"),
        (&["put", &nobody, "a", &file], 1, "there is no job"),
        (&["put", &job, "", &file], 2, "is empty"),
        (&["put", &job, &"x".repeat(257), &file], 2, "256 is the limit"),
        (&["put", &job, "a", "/nowhere"], 78, "cannot read /nowhere"),
        (&["list", "x"], 2, "24 hexadecimal digits"),
    ] {
        let (exit, text) = say(args);
        assert!(exit == code && text.contains(problem), "{args:?}: {exit} {text}");
    }
    let enqueue = |args: &[&str]| recruiter(&database, &[&["enqueue", "--class", "c", "--unique", "k"], args].concat());
    assert!(enqueue(&["--file", "/nowhere"]).err.contains("cannot read /nowhere"));
    assert_eq!(database.count("scheduled", doc! {}).await, 1, "a job without its file is not enqueued");
    assert_eq!(enqueue(&["--file", &format!("x={file}")]).code, 0);
    assert_eq!(database.count("payloads.files", doc! {}).await, 2);
    assert!(enqueue(&["--file", &file]).err.contains("nothing was enqueued"));
    assert_eq!(database.count("payloads.files", doc! {}).await, 2, "the file of a duplicate is deleted");
    assert_eq!(enqueue(&["--file", &file, "--id", &nobody]).code, 2);
    assert_eq!(enqueue(&["--file", &file, "--on-conflict", "replace"]).code, 2);
    assert_eq!(recruiter(&database, &["groups", "set", "full", "--most-waiting", "1"]).code, 0);
    let full = || recruiter(&database, &["enqueue", "--class", "c", "--group", "full", "--file", &file]);
    assert_eq!((full().code, full().code), (0, 1));
    assert_eq!(database.count("payloads.files", doc! {}).await, 3, "the file of a job that is refused is deleted");
}

/// Fails after some bytes.
struct Broken(usize);

impl AsyncRead for Broken {
    fn poll_read(mut self: Pin<&mut Self>, _: &mut task::Context<'_>, part: &mut ReadBuf<'_>) -> task::Poll<io::Result<()>> {
        if self.0 == 0 {
            return task::Poll::Ready(Err(io::Error::other("the disk is gone")));
        }
        let bytes = self.0.min(part.remaining());
        part.put_slice(&vec![7; bytes]);
        self.0 -= bytes;
        task::Poll::Ready(Ok(()))
    }
}

#[tokio::test]
async fn a_broken_transfer_is_an_error_and_shows_no_half_of_a_file() {
    let ((database, store), job) = (prepared().await, JobId::new());
    store.put_file(job, "a", "before".as_bytes()).await.unwrap();
    let broken = store.put_file(job, "a", Broken(1_000_000)).await.unwrap_err();
    assert!(matches!(&broken, FileError::Content { name, source } if name == "a" && source.to_string() == "the disk is gone"), "{broken}");
    assert_eq!(store.read_file(job, "a").await.unwrap(), b"before");
    database.until("payloads.chunks", doc! {}, 1, "the chunks of the half are deleted").await;
    for name in ["", "a\0b"] {
        assert!(matches!(store.put_file(job, name, "".as_bytes()).await, Err(FileError::Name { .. })));
    }
    assert!(matches!(store.read_file(job, "b").await, Err(FileError::NotFound { .. })));
    store.put_file(job, "large", Broken(0).chain("".as_bytes())).await.unwrap_err();
    store.put_file(job, "large", vec![7; 1_000_000].as_slice()).await.unwrap();
    database.raw("payloads.chunks").delete_one(doc! { "n": 2 }).await.unwrap();
    assert!(matches!(store.read_file(job, "large").await, Err(FileError::Transfer { .. })), "a part is missing");
}

/// The file of a job that runs again later stays with it; what belongs to no job goes.
#[tokio::test]
async fn the_cleaner_deletes_old_files_without_a_job() {
    let (database, store) = prepared().await;
    let waiting = NewJob::of_class("c", doc! {}).enqueue(&store).await.unwrap().id;
    store.put_file(JobId::new(), "young", "".as_bytes()).await.unwrap();
    let old = |number| ObjectId::from_parts(1_000_000_000, [0; 5], [0, 0, number]);
    let put = async |name: String, id: ObjectId| {
        let mut upload = bucket(&database).open_upload_stream(name).id(id.into()).await.unwrap();
        futures_util::AsyncWriteExt::write_all(&mut upload, b"content").await.unwrap();
        futures_util::AsyncWriteExt::close(&mut upload).await.unwrap();
    };
    put(format!("{waiting}/a"), old(1)).await;
    for number in 2..250 {
        put(format!("{}/a", JobId::new()), old(number)).await;
    }
    database.raw("payloads.chunks").insert_one(doc! { "files_id": old(0), "n": 0 }).await.unwrap();
    let mut cleaner = Process::on(&database, "recruiter-cleaner", &["--prune-every", "100ms"]);
    let (files, chunks) =
        (async || database.count("payloads.files", doc! {}).await, async || database.count("payloads.chunks", doc! {}).await);
    wait_until(SOON, "they are deleted", async || (files().await, chunks().await) == (2, 1)).await;
    assert_eq!(store.read_file(waiting, "a").await.unwrap(), b"content");
    assert!(cleaner.try_exit().is_none(), "{}", cleaner.stderr());
    database.raw("scheduled").delete_one(doc! { "_id": waiting }).await.unwrap();
    wait_until(SOON, "the next walk finds that its job is gone", async || (files().await, chunks().await) == (1, 0)).await;
}

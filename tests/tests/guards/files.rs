//! Files of jobs, next to those of other jobs and of other names.

use bson::{Bson, doc, oid::ObjectId};
use futures_util::AsyncWriteExt as _;
use mongodb::{gridfs::GridFsBucket, options::GridFsBucketOptions};
use recruiter_common::{
    JobId,
    control::{Change, Changed, Revision},
    files::JobFile,
    instant::Instant,
    store::WalkStep,
};

use crate::setting::{Setting, set_of};

const DAY: chrono::TimeDelta = chrono::TimeDelta::days(1);

fn bucket(setting: &Setting) -> GridFsBucket {
    setting
        .database
        .database()
        .gridfs_bucket(GridFsBucketOptions::builder().bucket_name("payloads".to_owned()).chunk_size_bytes(1_000).build())
}

/// A file that was written at this instant, in three chunks.
async fn written(setting: &Setting, name: &str, at: Instant, number: u8) -> ObjectId {
    let in_use = doc! { "$set": { "files": true } };
    setting.database.raw("metadata").update_one(doc! { "_id": "features" }, in_use).upsert(true).await.unwrap();
    let id = ObjectId::from_parts(u32::try_from(at.timestamp()).unwrap(), [0; 5], [0, 0, number]);
    let mut upload = bucket(setting).open_upload_stream(name).id(id.into()).await.unwrap();
    upload.write_all(&[number; 2_500]).await.unwrap();
    upload.close().await.unwrap();
    id
}

async fn ids(setting: &Setting, collection: &str, field: &str) -> Vec<ObjectId> {
    let ids = setting.database.raw(collection).distinct(field, doc! {}).await.unwrap();
    ids.iter().filter_map(Bson::as_object_id).collect()
}

#[tokio::test]
async fn a_file_is_found_replaced_and_deleted_by_its_job_and_its_name() {
    let setting = Setting::new().await;
    let [first, second] = [JobId::new(), JobId::new()];
    for (job, name, content) in [(first, "a", "1"), (first, "b", "2"), (second, "a", "3"), (first, "a", "4")] {
        setting.store.put_file(job, name, content.as_bytes()).await.unwrap();
    }
    let names = async |job| setting.store.files(job).await.unwrap().into_iter().map(|JobFile { name, .. }| name).collect::<Vec<_>>();
    assert_eq!((names(first).await, names(second).await), (vec!["a".into(), "b".into()], vec!["a".into()]));
    let read = async |job, name| setting.store.read_file(job, name).await.map(|content| String::from_utf8(content).unwrap()).ok();
    assert_eq!(
        (read(first, "a").await, read(first, "b").await, read(second, "a").await),
        (Some("4".into()), Some("2".into()), Some("3".into()))
    );
    assert_eq!(setting.count("payloads.chunks", doc! {}).await, 3, "the replaced one is gone");
    assert!(setting.store.delete_file(first, "a").await.unwrap());
    assert!(!setting.store.delete_file(first, "a").await.unwrap());
    assert_eq!((read(first, "a").await, read(first, "b").await, read(second, "a").await), (None, Some("2".into()), Some("3".into())));
    assert_eq!((setting.count("payloads.files", doc! {}).await, setting.count("payloads.chunks", doc! {}).await), (2, 2));
}

/// The newest revision counts, as in GridFS, if the writer died before it deleted the older one.
#[tokio::test]
async fn the_last_file_of_a_name_counts() {
    let setting = Setting::new().await;
    let job = JobId::new();
    let names = [1, 2, 3].map(|number| (format!("{job}/a"), number));
    for (name, number) in &names {
        let id = written(&setting, name, setting.store.now(), *number).await;
        setting.set("payloads.files", id, doc! { "uploadDate": bson::DateTime::from_millis([0, 5, 9, 7][usize::from(*number)]) }).await;
    }
    assert_eq!(setting.store.read_file(job, "a").await.unwrap(), [2; 2_500]);
    let files = setting.store.files(job).await.unwrap();
    assert_eq!(files.iter().map(|file| (file.bytes, file.written_at.timestamp_millis())).collect::<Vec<_>>(), [(2_500, 9)]);
}

/// Not those of waiting and finished jobs, young ones, and what an application has put there.
#[tokio::test]
async fn old_files_without_a_job_are_deleted() {
    let setting = Setting::new().await;
    let worker = setting.worker(9).await;
    let [waiting, finished] = setting.jobs().await;
    let held = setting.start(worker, [finished]).await;
    setting.archive(&[setting.done(&held[0])]).await;
    let (now, gone) = (setting.store.now(), JobId::new());
    let file = async |name: &str, at, number| written(&setting, name, at, number).await;
    let mut stay = vec![
        file(&format!("{waiting}/a"), now - DAY * 2, 1).await,
        file(&format!("{finished}/a"), now - DAY * 2, 2).await,
        file("report.pdf", now - DAY * 2, 3).await,
        file(&format!("{gone}/young"), now, 4).await,
    ];
    let behind = file(&format!("{gone}/a"), now - DAY * 2, 0).await;
    file(&format!("{gone}/a"), now - DAY * 2, 5).await;
    let step = setting.store.prune_files(Some(behind), now - DAY, 3).await.unwrap();
    assert_eq!(step, WalkStep { deleted: 0, next: Some(stay[2]) }, "not behind the position");
    assert_eq!(setting.store.prune_files(step.next, now - DAY, 9).await.unwrap(), WalkStep { deleted: 1, next: None });
    stay.push(behind);
    assert_eq!(set_of(ids(&setting, "payloads.files", "_id").await), set_of(stay.clone()));
    assert_eq!(set_of(ids(&setting, "payloads.chunks", "files_id").await), set_of(stay));
    assert_eq!(setting.count("payloads.chunks", doc! {}).await, 15);
}

#[tokio::test]
async fn uploads_that_were_not_finished_are_deleted_when_they_are_old() {
    let setting = Setting::new().await;
    let (now, job) = (setting.store.now(), JobId::new());
    let mut stay = Vec::new();
    for (at, number, is_finished) in [(now - DAY * 2, 0, false), (now - DAY * 2, 1, true), (now - DAY * 2, 2, false), (now, 3, false)] {
        let id = written(&setting, &format!("{job}/{number}"), at, number).await;
        if !is_finished {
            setting.database.raw("payloads.files").delete_one(doc! { "_id": id }).await.unwrap();
        }
        if number != 2 {
            stay.push(id);
        }
    }
    let step = setting.store.prune_chunks(Some(stay[0]), now - DAY, 1).await.unwrap();
    assert_eq!(step, WalkStep { deleted: 0, next: Some(stay[1]) });
    assert_eq!(setting.store.prune_chunks(step.next, now - DAY, 9).await.unwrap(), WalkStep { deleted: 1, next: None });
    assert_eq!(set_of(ids(&setting, "payloads.chunks", "files_id").await), set_of(stay));
    assert_eq!(setting.count("payloads.files", doc! {}).await, 1);
}

/// The copies outlive the files of the first job.
#[tokio::test]
async fn a_job_that_is_enqueued_again_has_copies_of_its_files() {
    let setting = Setting::new().await;
    let worker = setting.worker(9).await;
    let [job, other] = setting.jobs().await;
    let content: Vec<u8> = (0..3_000_000_u32).map(|n| u8::try_from(n % 251).unwrap()).collect();
    setting.store.put_file(job, "large", content.as_slice()).await.unwrap();
    setting.store.put_file(job, "empty", [].as_slice()).await.unwrap();
    setting.store.put_file(other, "large", "other".as_bytes()).await.unwrap();
    let held = setting.start(worker, [job]).await;
    setting.archive(&[setting.done(&held[0])]).await;
    let retry = Change::Retry { again: false, with: Revision::default().into() };
    let changed = setting.store.control(false).change(&retry, &[job]).await.unwrap();
    let new = match &changed[..] {
        [(_, Changed::EnqueuedAgain { new: Some(new), .. })] => *new,
        others => panic!("{others:?}"),
    };
    setting.store.delete_file(job, "large").await.unwrap();
    assert_eq!(setting.store.read_file(new, "large").await.unwrap(), content);
    assert_eq!(setting.store.read_file(new, "empty").await.unwrap(), b"");
    let chunks = setting.database.all("payloads.chunks", doc! {}).await;
    assert_eq!(chunks.len(), content.len().div_ceil(255 * 1024) + 1, "each once");
}

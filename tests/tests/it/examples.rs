//! The examples of the worker crate do what they say: a web service that enqueues in its own transactions, and a worker.

use std::{
    io::{Read as _, Write as _},
    net::TcpStream,
    process::Command,
};

use bson::doc;
use recruiter_tests::{
    local::Local,
    mongo::TestDatabase,
    processes::Process,
    wait::{SOON, wait_for, wait_until},
};

/// Status and body of the answer to one request.
fn ask(address: &str, request: &str, body: &str) -> (u16, String) {
    let mut connection = TcpStream::connect(address).unwrap();
    let length = body.len();
    let head = format!(
        "{request} HTTP/1.1\r\nhost: shop\r\nconnection: close\r\ncontent-type: application/json\r\ncontent-length: {length}\r\n\r\n"
    );
    connection.write_all((head + body).as_bytes()).unwrap();
    let mut answer = String::new();
    connection.read_to_string(&mut answer).unwrap();
    let (head, body) = answer.split_once("\r\n\r\n").unwrap();
    (head.split(' ').nth(1).unwrap().parse().unwrap(), body.to_owned())
}

#[tokio::test(flavor = "multi_thread")]
async fn an_order_of_the_web_service_has_its_invoice_by_the_worker() {
    let database = TestDatabase::new().await;
    let environment = [("MONGODB_URI", database.uri()), ("LISTEN", "127.0.0.1:0")];
    let service = Process::start("examples/web_service", &[], &environment);
    let listening = async || service.stdout().trim_end().strip_prefix("listening on ").map(str::to_owned);
    let address = wait_for(SOON, "it listens", listening).await;
    let recruiter = Local::recruiter(&database, &[]);
    let worker = Process::start("examples/worker", &[], &environment);

    let (status, job) = ask(&address, "POST /orders/17", r#"{"cents": 1999}"#);
    assert_eq!(status, 202, "{job}");
    let order = database.raw("orders").find_one(doc! { "_id": "17" }).await.unwrap().unwrap();
    assert_eq!(order.get_object_id("invoice").unwrap().to_hex(), job);
    wait_until(SOON, "the invoice is there", async || ask(&address, "GET /orders/17/invoice", "").0 == 200).await;
    assert_eq!(ask(&address, "GET /orders/17/invoice", "").1, "invoice 1 of order 17");
    let retried = database.raw("archived").find_one(doc! { "urn": "17" }).await.unwrap().unwrap();
    assert_eq!(retried.get_array("executions").unwrap().len(), 2, "the first attempt for an order fails: {retried}");

    // The same order once more: neither it nor a job is stored.
    assert_eq!(ask(&address, "POST /orders/17", r#"{"cents": 1}"#).0, 500);
    assert_eq!(database.count("scheduled", doc! {}).await, 0);
    assert_eq!(ask(&address, "POST /orders/18", r#"{"cents": 0}"#).0, 202);
    database.until("archived", doc! { "urn": "18", "why": "gave-up" }, 1, "nothing is to be paid").await;
    assert_eq!(ask(&address, "GET /orders/18/invoice", "").0, 404);
    assert_eq!(ask(&address, "POST /primes/1000", "").0, 202);
    database.until("archived", doc! { "workable.class": "CountPrimes", "result": 168 }, 1, "the primes are counted").await;

    wait_until(SOON, "the failure is logged", async || worker.stderr().contains("a customer gets no invoice")).await;
    let logged = worker.stderr();
    let sending = logged.lines().find(|line| line.contains("sending an invoice")).unwrap();
    for field in [format!("job.id={job}"), "job.class=\"SendInvoice\"".into(), "job.attempt=1".into(), "worker.id=".into()] {
        assert!(sending.contains(&field), "{field} is not in {sending}");
    }
    recruiter.stop().await;
}

/// Other systems than this one need the sources of what only they use: `.ci/run` asks for them.
#[test]
fn the_libraries_need_no_command_line_and_no_linux() {
    for library in ["recruiter-common", "recruiter-worker"] {
        let cargo = std::env::var_os("CARGO").unwrap_or_else(|| "cargo".into());
        let tree = Command::new(cargo)
            .args(["tree", "--offline", "--locked", "--edges", "normal", "--prefix", "none", "--format", "{lib}", "--package", library])
            .current_dir(env!("CARGO_MANIFEST_DIR"))
            .output()
            .unwrap();
        assert!(tree.status.success(), "{}", String::from_utf8_lossy(&tree.stderr));
        let needed = String::from_utf8(tree.stdout).unwrap();
        assert!(needed.lines().any(|krate| krate == "mongodb"), "{needed}");
        for krate in ["anyhow", "clap", "nix", "procfs", "sd_notify", "tracing_subscriber"] {
            assert!(!needed.lines().any(|needed| needed == krate), "{library} needs {krate}");
        }
    }
}

//! A client of the HTTP API and the pages, and the process that serves them.

use reqwest::{Client, Method, RequestBuilder, Response, StatusCode, header::CONTENT_TYPE, redirect::Policy};
use serde_json::Value;

use crate::{
    mongo::TestDatabase,
    processes::Process,
    wait::{SOON, wait_for},
};

/// A `recruiter web`, and what it answers.
#[derive(Debug)]
pub struct Api {
    /// The process.
    pub process: Process,
    /// `http://127.0.0.1:PORT`.
    pub at: String,
    client: Client,
}

impl Api {
    /// Serves this database at a free port, with these further arguments.
    pub async fn serve(database: &TestDatabase, args: &[&str]) -> Self {
        Self::serve_with(args, &[("MONGODB_URI", database.uri())]).await
    }

    /// Serves with these further arguments, in this environment.
    pub async fn serve_with(args: &[&str], env: &[(&str, &str)]) -> Self {
        let process = Process::start("recruiter", &[&["web", "--listen", "127.0.0.1:0"], args].concat(), env);
        let named = async || {
            let log = process.stderr();
            let line = log.lines().find(|line| line.contains("serving the API"))?;
            Some(format!("http://{}", line.split_once("address=")?.1.split_whitespace().next()?))
        };
        let at = wait_for(SOON, "it serves the API", named).await;
        Self { process, at, client: Client::builder().no_proxy().redirect(Policy::none()).timeout(SOON).build().expect("a client") }
    }

    /// A request of a path below `/api/v1`.
    pub fn request(&self, method: Method, path: &str) -> RequestBuilder {
        self.client.request(method, format!("{}/api/v1{path}", self.at))
    }

    /// A request of a page. A redirection is not followed.
    pub fn page(&self, method: Method, path: &str) -> RequestBuilder {
        self.client.request(method, format!("{}{path}", self.at))
    }

    /// Reads a page.
    pub async fn read(&self, path: &str) -> (u16, String) {
        text(self.page(Method::GET, path)).await
    }

    /// Reads a path.
    pub async fn get(&self, path: &str) -> (u16, Value) {
        answer(self.request(Method::GET, path)).await
    }

    /// Sends JSON to a path.
    pub async fn post(&self, path: &str, body: &Value) -> (u16, Value) {
        answer(self.request(Method::POST, path).json(body)).await
    }
}

impl Api {
    /// Opens a stream of server-sent events, behind the event with this id.
    pub async fn open(&self, path: &str, last: Option<&str>) -> Stream {
        let request = self.request(Method::GET, path);
        Self::stream(if let Some(last) = last { request.header("Last-Event-ID", last) } else { request }).await
    }

    /// Opens a stream of server-sent events.
    pub async fn stream(request: RequestBuilder) -> Stream {
        let response = request.send().await.expect("it answers");
        assert_eq!((response.status(), content(&response)), (StatusCode::OK, "text/event-stream"));
        Stream { response, rest: String::new() }
    }
}

/// A stream of server-sent events.
#[derive(Debug)]
pub struct Stream {
    response: Response,
    rest: String,
}

/// One of them.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Sent {
    /// Its kind; empty for the usual one.
    pub event: String,
    /// Its id, or else that of an earlier one.
    pub id: String,
    /// Its data; `null` without any.
    pub data: Value,
}

impl Stream {
    /// The next one, also one that has only an id or a comment. `None` at the end.
    pub async fn next(&mut self) -> Option<Sent> {
        loop {
            if let Some((block, rest)) = self.rest.split_once("\n\n") {
                let mut sent = Sent::default();
                for (field, value) in block.lines().filter_map(|line| line.split_once(": ")) {
                    match field {
                        "event" => sent.event = value.into(),
                        "id" => sent.id = value.into(),
                        "data" => sent.data = serde_json::from_str(value).expect("JSON"),
                        _ => {}
                    }
                }
                self.rest = rest.to_owned();
                return Some(sent);
            }
            let chunk = self.response.chunk().await.ok()??;
            self.rest.push_str(std::str::from_utf8(&chunk).expect("UTF-8 that is not cut"));
        }
    }

    /// The next one with data.
    pub async fn data(&mut self) -> Option<Sent> {
        loop {
            let sent = self.next().await?;
            if sent.data != Value::Null {
                return Some(sent);
            }
        }
    }
}

/// The status and the JSON of an answer; `null` of an empty one.
pub async fn answer(request: RequestBuilder) -> (u16, Value) {
    let response = request.send().await.expect("it answers");
    let status = response.status();
    if status.is_client_error() || status.is_server_error() {
        assert_eq!(content(&response), "application/problem+json", "{status}");
    }
    let text = response.text().await.expect("the whole answer comes");
    let value = if text.is_empty() { Value::Null } else { serde_json::from_str(&text).unwrap_or_else(|error| panic!("{error}: {text}")) };
    if status.is_client_error() || status.is_server_error() {
        assert_eq!(value["status"], status.as_u16(), "{value}");
        assert!(value["detail"].as_str().is_some_and(|detail| detail.len() > 10), "{value}");
    }
    (status.as_u16(), value)
}

/// The status and the text of an answer, which is a page. Every page has the headers that keep others out.
pub async fn text(request: RequestBuilder) -> (u16, String) {
    let response = request.send().await.expect("it answers");
    let header = |name: &str| response.headers().get(name).and_then(|value| value.to_str().ok()).unwrap_or_default();
    let policy = header("content-security-policy");
    assert!(
        policy.starts_with("default-src 'none'") && policy.contains("frame-ancestors 'none'") && !policy.contains("unsafe"),
        "{policy}"
    );
    assert_eq!(
        ["x-content-type-options", "referrer-policy", "cache-control"].map(header),
        ["nosniff", "same-origin", "no-store"],
        "{}",
        response.url()
    );
    let status = response.status();
    assert!(status.is_redirection() || content(&response).starts_with("text/html"), "{} {status}", response.url());
    (status.as_u16(), response.text().await.expect("the whole page comes"))
}

fn content(response: &Response) -> &str {
    response.headers().get(CONTENT_TYPE).and_then(|content| content.to_str().ok()).unwrap_or_default()
}

/// Whether a status is that of success.
pub fn is_success(status: u16) -> bool {
    StatusCode::from_u16(status).is_ok_and(|status| status.is_success())
}
